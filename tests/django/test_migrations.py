"""`manage.py migrate` makes the very tables of `taskguard ledger create`, and models fit them."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from support.django_shop import django_on
from taskguard.ledger.sql import SqlLedger


def columns(url: str) -> dict[str, list[tuple[str, str, bool]]]:
    engine = sa.create_engine(url)
    inspector = sa.inspect(engine)
    found = {
        table: [
            (column["name"], str(column["type"]), column["nullable"])
            for column in inspector.get_columns(table)
        ]
        + [(str(index["name"]), "index", False) for index in inspector.get_indexes(table)]
        for table in inspector.get_table_names()
        if table.startswith("taskguard_")
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
    assert ("taskguard_works_due", "index", False) in created["taskguard_works"]
    with django_on(default=url):  # tables that are there stay
        assert columns(url) == created
        call_command("migrate", "taskguard", "zero", verbosity=0)
        assert columns(url) == {}
        call_command("migrate", "taskguard", verbosity=0)
        assert columns(url) == created
        ledger.check_schema()
        call_command("makemigrations", check=True, dry_run=True, verbosity=0)
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
            assert fields == [(name, null) for name, kind, null in table if kind != "index"]
            assert list(model.objects.all()) == []
