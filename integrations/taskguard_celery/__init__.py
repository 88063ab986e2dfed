"""taskguard for Celery."""
