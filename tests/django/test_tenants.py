"""Tables in each tenant's schema, as django-tenants makes them for TENANT_APPS, are found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from support.django_shop import django_on
from taskguard import errors
from taskguard.integration import Level
from taskguard.ledger.sql import SqlLedger

TENANTS = {"TENANT_APPS": ["django.contrib.auth", "taskguard_django"]}
TYPES = {"public": {"APPS": ["taskguard_django"]}, "shop": {"APPS": ["taskguard_django.apps.X"]}}


@pytest.fixture
def tenant(pg_url: str) -> Iterator[str]:
    """A database with the tables in the schema of a tenant; gives its URL."""
    engine = sa.create_engine(pg_url, poolclass=sa.NullPool)
    with engine.begin() as db:
        db.execute(sa.text("create schema acme"))
    in_schema = {"options": "-c search_path=acme"}
    ledger = SqlLedger(sa.make_url(pg_url).update_query_dict(in_schema))
    ledger.create_schema()
    ledger.close()
    return pg_url


def findings(ledger: Any) -> dict[str, Any]:
    return {each.name: each for each in ledger.check()}


def test_tables_in_another_schema_only(tenant: str) -> None:
    """If the tables are in another schema only, a worker does not start, and says where they
    are."""
    ledger = SqlLedger(tenant)
    with pytest.raises(errors.LedgerSchemaError, match=r"but in the schema acme.*SHARED_APPS"):
        ledger.check_schema()
    finding = findings(ledger)["tables_missing"]
    assert "but in the schema acme" in finding.what
    assert "SHARED_APPS" in finding.fix
    ledger.create_schema()
    ledger.check_schema()
    assert "tables_missing" not in findings(ledger)
    ledger.close()


@pytest.mark.parametrize("settings", [TENANTS, {"TENANT_TYPES": TYPES}], ids=["apps", "types"])
def test_start_doctor_and_check_name_the_setting(
    tenant: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The worker's start, the doctor and `check` name the setting, even if the public schema has
    tables."""
    from celery import Celery
    from django.core.management import call_command
    from django.core.management.base import SystemCheckError
    from django.test import override_settings

    import taskguard_celery
    import taskguard_django

    app = Celery("tenants", broker="memory://", set_as_current=False)
    app.conf.taskguard_locks = None

    @app.task(shared=False)
    @taskguard_celery.guarded_task(key="orders")
    def ship() -> None: ...

    with django_on(default=tenant):
        ledger = taskguard_django.ledger()
        assert "tenant_tables" not in findings(ledger)
        with override_settings(**settings):
            assert findings(ledger)["tenant_tables"].level is Level.ERROR
            with caplog.at_level(logging.WARNING, logger="taskguard"):
                taskguard_celery.check_worker(app)
            assert caplog.text.count("(finding tenant_tables)") == 1
            with pytest.raises(SystemCheckError, match=r"taskguard\.tenant_tables"):
                call_command("check", fail_level="WARNING")


def test_without_tables_the_worker_does_not_start_and_names_the_setting(pg_url: str) -> None:
    """Without tables a worker does not start, and names the setting. New tables would not be found
    by tenants' messages."""
    from django.test import override_settings

    import taskguard_django

    with django_on(default=pg_url):
        engine = sa.create_engine(pg_url, poolclass=sa.NullPool)
        with engine.begin() as db:
            db.execute(sa.text("drop table taskguard_schema"))
        ledger = taskguard_django.ledger()
        with override_settings(**TENANTS), pytest.raises(errors.LedgerSchemaError) as caught:
            ledger.check_schema()
    assert "SHARED_APPS" in str(caught.value)
    assert "ledger create" not in str(caught.value)
