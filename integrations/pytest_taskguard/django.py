"""The fixtures' ledger in a Django project: the test database that pytest-django creates.

`plugin.py` loads this if pytest-django is installed and `taskguard_django` is in INSTALLED_APPS.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

__all__ = ["is_wanted", "taskguard_ledger"]


def is_wanted(config: pytest.Config) -> bool:
    """Return True if the tests belong to a Django project with `taskguard_django`."""
    if not config.pluginmanager.hasplugin("django"):
        return False
    django = sys.modules.get("django.apps")
    return django is not None and django.apps.ready and django.apps.is_installed("taskguard_django")


@pytest.fixture
def taskguard_ledger(transactional_db: None) -> Any:
    """The ledger's database: Django's test database, emptied, in which `atomic()` writes.

    It uses `transactional_db`, because guards commit. So the test needs no `django_db` mark.
    """
    del transactional_db
    from django.db import connections

    from taskguard_django.conf import alias, url_of
    from taskguard_django.test import forget

    forget()
    return url_of(connections[alias()])
