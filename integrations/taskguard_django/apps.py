"""The Django app: it makes Django's settings the defaults of this process."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate

from taskguard.integration import set_defaults
from taskguard_django import conf

__all__ = ["TaskguardConfig"]


class TaskguardConfig(AppConfig):
    """The app for `INSTALLED_APPS += ["taskguard_django"]`."""

    name = "taskguard_django"
    label = "taskguard"
    verbose_name = "taskguard"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Make Celery, RQ and `taskguard.connect()` use the servers of Django's settings."""
        from taskguard_django import checks

        set_defaults(
            locks=conf.locks,
            ledger=conf.ledger,
            namespace=conf.namespace,
            formerly_namespaces=conf.formerly_namespaces,
        )
        checks.register()
        post_migrate.connect(_forget_what_tests_flush, sender=self, weak=False)


def _forget_what_tests_flush(using: str, plan: Any = None, **_: Any) -> None:
    """Empty the ledger's tables when `TransactionTestCase` empties those of the models.

    Do nothing outside of tests, because programs also send this signal to create permissions.
    """
    if plan is None and conf.testing() and using == conf.alias():
        from taskguard_django.test import forget

        forget()
