"""`manage.py taskguard`."""
