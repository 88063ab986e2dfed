"""`manage.py migrate` makes the very tables of `taskguard ledger create`, and models fit them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from support.django_shop import django_on
from support.old_tables import make_old_tables, shape_of
from taskguard import errors
from taskguard.ledger.schema import upgrades
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import SCHEMA_VERSION


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
    """The migration makes exactly the ledger's tables. It can be reverted and repeated."""
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
def test_migrations_of_an_older_checkout_are_refused(
    request: pytest.FixtureRequest, name: str
) -> None:
    """`migrate` finds 0001 applied and does nothing. The check and the first use say what to do.

    `migrate taskguard zero` drops the tables. After that, `migrate` creates them again.
    """
    from django.core.management import call_command

    url = request.getfixturevalue(name)
    with django_on(default=url):
        from django.db import connections

        from taskguard_django import conf

        created = columns(url)
        call_command("migrate", "taskguard", "zero", verbosity=0)
        _apply_older_migrations(url)
        call_command("migrate", "taskguard", verbosity=0)
        output = io.StringIO()
        call_command("check", databases=["default"], stderr=output)
        assert "taskguard.tables_missing" in output.getvalue()
        assert "version 4, and this library needs version 5" in output.getvalue()
        assert "manage.py migrate taskguard zero" in output.getvalue()
        with pytest.raises(errors.LedgerSchemaError, match=r"needs version 5.*Drop the tables"):
            conf.ledger().check_schema()
        call_command("migrate", "taskguard", "zero", verbosity=0)
        assert "taskguard_work" not in connections["default"].introspection.table_names()
        call_command("migrate", "taskguard", verbosity=0)
        assert columns(url) == created
        conf.ledger().check_schema()


def _apply_older_migrations(url: str) -> None:
    """Leave the tables of version 4 and its four migrations in `django_migrations`."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    make_old_tables(engine, 4)
    names = (
        "0001_initial",
        "0002_numbers_of_a_message_in_a_work",
        "0003_work_in_line_for_its_key",
        "0004_order_and_bounds_of_keys",
    )
    with engine.begin() as db:
        for name in names:
            db.execute(
                sa.text(
                    "insert into django_migrations (app, name, applied) "
                    "values ('taskguard', :name, current_timestamp)"
                ),
                {"name": name},
            )


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
def test_migrate_refuses_tables_that_an_older_checkout_created(
    request: pytest.FixtureRequest, name: str
) -> None:
    """`migrate` refuses tables that an older checkout's `taskguard ledger create` made."""
    from django.core.management import call_command

    url = request.getfixturevalue(name)
    with django_on(default=url):
        call_command("migrate", "taskguard", "zero", verbosity=0)
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        make_old_tables(engine, 3)
        with pytest.raises(errors.LedgerSchemaError, match=r"version 3, .* needs version 5"):
            call_command("migrate", "taskguard", verbosity=0)


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
def test_a_later_migration_upgrades_the_tables(
    request: pytest.FixtureRequest, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later migration upgrades the tables once, and `sqlmigrate` prints its SQL."""
    url = request.getfixturevalue(name)
    to = SCHEMA_VERSION + 1
    add = "CREATE TABLE taskguard_colours (colour INTEGER)"
    step = upgrades.Step(
        to=to, why="colours", statements=dict.fromkeys(("postgresql", "sqlite"), (add,))
    )
    with django_on(default=url):
        from django.db import connections

        from taskguard_django.operations import CreateLedger, UpgradeLedger

        monkeypatch.setattr(upgrades, "STEPS", (step,))
        monkeypatch.setattr(upgrades, "SCHEMA_VERSION", to)

        def run(operation: Any, **options: Any) -> Any:
            with connections["default"].schema_editor(**options) as editor:
                operation.database_forwards("taskguard", editor, None, None)
            return editor

        upgrade = UpgradeLedger(to=to)
        assert add in "".join(run(upgrade, collect_sql=True).collected_sql)
        assert "taskguard_colours" not in columns(url)
        for _ in range(2):
            run(upgrade)
            assert columns(url)["taskguard_colours"] == [("colour", "INTEGER", True)]
        drop = ("DROP TABLE taskguard_colours",)
        later = replace(step, to=to + 1, statements=dict.fromkeys(step.statements, drop))
        monkeypatch.setattr(upgrades, "STEPS", (step, later))
        monkeypatch.setattr(upgrades, "SCHEMA_VERSION", to + 1)
        run(CreateLedger())  # of tables that `taskguard ledger create` made
        assert "taskguard_colours" not in columns(url)


def test_only_the_ledgers_database_gets_tables(pg_url: str, sqlite_url: str) -> None:
    """Only the ledger's database gets tables, although each database is migrated."""
    with django_on(default=pg_url, other=sqlite_url):
        assert columns(pg_url)
        assert columns(sqlite_url) == {}


def test_a_test_database_in_memory_is_migrated() -> None:
    """A test database in memory can be migrated."""
    with django_on(default="sqlite:///:memory:"):
        from taskguard_django.models import Work

        assert not Work.objects.exists()


@pytest.mark.parametrize("name", ["pg_url", "sqlite_url"])
def test_models_have_the_tables_columns(request: pytest.FixtureRequest, name: str) -> None:
    """The models have the tables' columns, by name and by whether they may be NULL."""
    url = request.getfixturevalue(name)
    with django_on(default=url):
        from taskguard_django.models import Key, Work, Worker

        for model in (Key, Work, Worker):
            fields = [(field.column, field.null) for field in model._meta.local_fields]
            table = columns(url)[model._meta.db_table]
            found = [(name, null) for name, kind, null in table if kind != "index"]
            assert sorted(fields) == sorted(found)
            assert list(model.objects.all()) == []
