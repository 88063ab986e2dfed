"""The project of `DJANGO_SETTINGS_MODULE`, for the command `taskguard`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from taskguard import TaskGuard, connect
from taskguard.errors import CommandTargetError

__all__ = ["open_project"]


def open_project() -> TaskGuard:
    """Return taskguard with the settings of the project.

    Raises:
        CommandTargetError: a module of the project cannot be imported.
    """
    import django

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `manage.py` and `celery -A` do
    try:
        django.setup()
    except ImportError as error:
        raise CommandTargetError(
            f"DJANGO_SETTINGS_MODULE={os.environ.get('DJANGO_SETTINGS_MODULE', '')}: {error}. Run "
            "the command in the folder of manage.py, or unset the variable."
        ) from error
    return connect()
