"""taskguard makes Celery and RQ tasks safe to deliver twice."""
