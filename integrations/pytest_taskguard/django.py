"""The fixtures' ledger in a Django project: Django's test database, which pytest-django makes.

Read by `plugin.py` where pytest-django is there and `taskguard_django` is among INSTALLED_APPS.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

__all__ = ["is_wanted", "taskguard_ledger"]


def is_wanted(config: pytest.Config) -> bool:
    """Whether the tests are those of a Django project with `taskguard_django`."""
    if not config.pluginmanager.hasplugin("django"):
        return False
    django = sys.modules.get("django.apps")
    return django is not None and django.apps.ready and django.apps.is_installed("taskguard_django")


@pytest.fixture
def taskguard_ledger(transactional_db: None) -> Any:
    """The ledger's database: Django's test database, emptied, where `atomic()` writes.

    It takes `transactional_db`, as guards commit; so the test needs no mark.
    """
    del transactional_db
    from django.db import connections

    from taskguard_django.conf import alias, url_of
    from taskguard_django.test import forget

    forget()
    return url_of(connections[alias()])
