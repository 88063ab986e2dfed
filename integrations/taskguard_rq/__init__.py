"""taskguard for RQ."""
