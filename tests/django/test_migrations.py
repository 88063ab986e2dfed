"""`manage.py migrate` makes the very tables of `taskguard ledger create`, and models fit them."""

from __future__ import annotations

import io

import pytest
import sqlalchemy as sa

from support.django_shop import django_on
from support.old_tables import back_to_version_1, shape_of
from taskguard.ledger.sql import SqlLedger


def columns(url: str) -> dict[str, list[tuple[str, str, bool]]]:
    engine = sa.create_engine(url)
    found = {
        table: [*columns, *((name, "index", False) for name in [*indexes, *map(str, key), *checks])]
        for table, (columns, indexes, key, checks) in shape_of(engine).items()
    }
    engine.dispose()
    return found


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
def test_a_migrated_database_is_the_ledgers(request: pytest.FixtureRequest, name: str) -> None:
    """Nothing more, nothing less; backwards nothing is left, and it can be done again."""
    from django.core.management import call_command

    url = request.getfixturevalue(name)
    ledger = SqlLedger(url)
    ledger.create_schema()
    created = columns(url)
    assert ("taskguard_work_due", "index", False) in created["taskguard_work"]
    with django_on(default=url):  # tables that are there stay
        assert columns(url) == created
        call_command("migrate", "taskguard", "zero", verbosity=0)
        assert columns(url) == {}
        call_command("migrate", "taskguard", verbosity=0)
        assert columns(url) == created
        ledger.check_schema()
        call_command("makemigrations", check=True, dry_run=True, verbosity=0)
    ledger.close()


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
def test_tables_of_an_older_version_are_migrated(request: pytest.FixtureRequest, name: str) -> None:
    """Those that were there before; printed as SQL it is the same."""
    from django.core.management import call_command

    url = request.getfixturevalue(name)
    ledger = SqlLedger(url)
    ledger.create_schema()
    created = columns(url)
    engine = sa.create_engine(url)
    back_to_version_1(engine)
    engine.dispose()
    assert columns(url) != created
    with django_on(default=url):
        assert columns(url) == created
        ledger.check_schema()
        printed = io.StringIO()
        call_command("sqlmigrate", "taskguard", "0002", stdout=printed)
        assert "PRIMARY KEY (message, work)" in printed.getvalue()
        assert "parked" not in printed.getvalue()
        call_command("sqlmigrate", "taskguard", "0003", stdout=printed)
        assert "ADD COLUMN" in printed.getvalue()
        call_command("sqlmigrate", "taskguard", "0004", stdout=printed)
        assert "(key, rank, parked)" in printed.getvalue().replace("`", "").replace("(255)", "")
    ledger.close()


def test_only_the_ledgers_database_gets_tables(pg_url: str, sqlite_url: str) -> None:
    """Every database is migrated in its turn."""
    with django_on(default=pg_url, other=sqlite_url):
        assert columns(pg_url)
        assert columns(sqlite_url) == {}


def test_a_test_database_in_memory_is_migrated() -> None:
    """Tests that guard nothing need no file."""
    with django_on(default="sqlite:///:memory:"):
        from taskguard_django.models import Work

        assert not Work.objects.exists()


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
def test_models_have_the_tables_columns(request: pytest.FixtureRequest, name: str) -> None:
    """By name and by what may be NULL."""
    url = request.getfixturevalue(name)
    with django_on(default=url):
        from taskguard_django.models import Key, Work

        for model in (Key, Work):
            fields = [(field.column, field.null) for field in model._meta.local_fields]
            table = columns(url)[model._meta.db_table]
            found = [(name, null) for name, kind, null in table if kind != "index"]
            assert sorted(fields) == sorted(found)
            assert list(model.objects.all()) == []
