"""taskguard for Django: commit a guarded body's effects and DONE in Django's own transaction.

    INSTALLED_APPS += ["taskguard_django"]
    TASKGUARD = {"LOCKS": "redis://localhost/1", "DATABASE": "default"}

Read next: `transactions.py` (`atomic`), `conf.py` (the settings, and the ledger).
"""

from __future__ import annotations

from taskguard import errors

try:
    import django as _django  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingDriverError(
        "taskguard_django needs the package django, which is not installed: pip install "
        "'celery-taskguard[django]'."
    ) from error

from taskguard_django.conf import ledger
from taskguard_django.connection import connection
from taskguard_django.rows import row
from taskguard_django.transactions import atomic, checkpoint

__all__ = ["atomic", "checkpoint", "connection", "ledger", "row"]
