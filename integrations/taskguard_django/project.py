"""The project of `DJANGO_SETTINGS_MODULE`, for the command `taskguard`."""

from __future__ import annotations

from taskguard import TaskGuard, connect

__all__ = ["open_project"]


def open_project() -> TaskGuard:
    """Return taskguard with the settings of the project."""
    import django

    django.setup()
    return connect()
