"""The app: its settings become this process's defaults."""

from __future__ import annotations

from django.apps import AppConfig

from taskguard import set_defaults
from taskguard_django import conf

__all__ = ["TaskguardConfig"]


class TaskguardConfig(AppConfig):
    """`INSTALLED_APPS += ["taskguard_django"]`."""

    name = "taskguard_django"
    label = "taskguard"
    verbose_name = "taskguard"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Celery, RQ and `taskguard.connect()` find lock server and ledger by Django's settings."""
        from taskguard_django import checks

        set_defaults(locks=conf.locks, ledger=conf.ledger, namespace=conf.namespace)
        checks.register()
