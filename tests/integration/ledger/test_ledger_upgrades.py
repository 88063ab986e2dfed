"""Tables of another version: refused if nothing upgrades them, upgraded step by step otherwise.

This library has no step yet, so these tests bring made-up steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

from support.claims import request as a_request
from support.databases import DATABASES
from support.old_tables import OLD_VERSIONS, make_old_tables, shape_of
from taskguard.cli import main
from taskguard.errors import LedgerSchemaError
from taskguard.ledger.schema import upgrades
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import METADATA, SCHEMA_VERSION
from taskguard.model.claims import Claimed

KINDS = ("postgresql", "mariadb", "mysql", "sqlite")
FIRST_VERSION = 5


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    made: str = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(url, poolclass=sa.NullPool)
    yield made
    made.dispose()


class TestTablesOfAnOlderCheckout:
    """Versions 1 to 4 were never released."""

    @pytest.mark.parametrize("version", OLD_VERSIONS)
    def test_are_refused(self, url: str, engine: sa.Engine, version: int) -> None:
        """The error names the versions and the tables to drop. Nothing is changed."""
        make_old_tables(engine, version)
        shape = shape_of(engine)
        with closing(SqlLedger(url)) as ledger:
            for use in (
                ledger.check_schema,
                ledger.create_schema,
                ledger.upgrade_schema,
                ledger.upgrade_statements,
                lambda: upgrades.upgrade_statements(url, version=version),
            ):
                with pytest.raises(LedgerSchemaError) as caught:
                    use()
                assert f"version {version}, and this library needs version 5" in str(caught.value)
                assert "from before the first release" in str(caught.value)
                assert f"Drop the tables {', '.join(sorted(METADATA.tables))}" in str(caught.value)
                assert "ledger upgrade" not in str(caught.value)
            (finding,) = (each for each in ledger.check() if each.name == "tables_version")
            assert finding.what in str(caught.value)
            assert "taskguard_work" in finding.fix
            assert shape_of(engine) == shape
            with engine.begin() as db:
                for table in shape:
                    db.execute(sa.text(f"drop table {table}"))
            ledger.create_schema()
            ledger.check_schema()

    @pytest.mark.parametrize(
        "command",
        ["ledger create --url", "ledger upgrade --url", "ledger upgrade --sql --url", "purge --url",
         "doctor --ledger"],
    )  # fmt: skip
    def test_end_commands(
        self, sqlite_url: str, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each command exits with 1 and says what to do. None says that it created tables."""
        engine = sa.create_engine(sqlite_url, poolclass=sa.NullPool)
        make_old_tables(engine, 4)
        assert main([*command.split(), sqlite_url]) == 1
        printed = capsys.readouterr()
        said = " ".join((printed.out + printed.err).split())
        assert "tables have version 4, and this library needs version 5" in said
        assert "Drop the tables" in said
        assert "created" not in said


@pytest.fixture
def older(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database whose tables are one version behind, because a step adds a column."""
    _create(url)
    add = "ALTER TABLE taskguard_work ADD COLUMN colour VARCHAR(9) DEFAULT '5%'"
    _add_steps(monkeypatch, (add,))
    return url


def _create(url: str) -> None:
    with closing(SqlLedger(url)) as ledger:
        ledger.create_schema()


def _add_steps(monkeypatch: pytest.MonkeyPatch, *steps: tuple[str, ...]) -> None:
    made = tuple(
        upgrades.Step(
            to=SCHEMA_VERSION + number,
            why="work has a colour",
            statements=dict.fromkeys(KINDS, statements),
        )
        for number, statements in enumerate(steps, start=1)
    )
    monkeypatch.setattr(upgrades, "STEPS", (*upgrades.STEPS, *made))
    monkeypatch.setattr(upgrades, "SCHEMA_VERSION", SCHEMA_VERSION + len(steps))


def test_older_tables_are_upgraded_by_the_command_that_is_named(
    older: str, engine: sa.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ledger create` changes nothing and does not claim that it did. `upgrade` is idempotent."""
    ledger = SqlLedger(older)
    for use in (ledger.check_schema, ledger.create_schema):
        with pytest.raises(LedgerSchemaError, match=r"Stop the workers.*ledger upgrade") as caught:
            use()
        assert "ledger create" not in str(caught.value)
    assert main(["ledger", "create", "--url", older]) == 1
    assert "created" not in capsys.readouterr().out
    assert main(["ledger", "upgrade", "--url", older, "--sql"]) == 0
    printed = capsys.readouterr().out
    assert "ADD COLUMN colour" in printed
    with pytest.raises(LedgerSchemaError):
        ledger.check_schema()  # printed, not run
    for said in (f"version {SCHEMA_VERSION} -> {SCHEMA_VERSION + 1}", "already"):
        assert main(["ledger", "upgrade", "--url", older]) == 0
        assert said in capsys.readouterr().out
    ledger.check_schema()
    ledger.create_schema()
    assert isinstance(ledger.claim(a_request()), Claimed)
    ledger.close()
    with engine.connect() as db:
        assert db.execute(sa.text("select colour from taskguard_work")).scalars().all() == ["5%"]


def test_the_printed_upgrade_is_the_one_that_is_run(older: str, engine: sa.Engine) -> None:
    """A person runs it statement by statement."""
    with closing(SqlLedger(older)) as ledger:
        with engine.begin() as db:
            for statement in ledger.upgrade_statements():
                db.execute(sa.DDL(statement.replace("%", "%%")))
        ledger.check_schema()
        assert ledger.upgrade_statements() == []


def test_steps_run_one_after_the_other(
    url: str, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's version is recorded. SQL for migrations can stop at a version."""
    _create(url)
    steps = ("CREATE TABLE taskguard_a (a INTEGER)", "ALTER TABLE taskguard_a ADD COLUMN b INTEGER")
    _add_steps(monkeypatch, *((each,) for each in steps))
    first, second = SCHEMA_VERSION + 1, SCHEMA_VERSION + 2
    record = "UPDATE taskguard_schema SET version ="
    to_first = upgrades.upgrade_statements(url, version=SCHEMA_VERSION, to=first)
    assert to_first == [steps[0], f"{record} {first}"]
    to_second = upgrades.upgrade_statements(url, version=first)
    assert to_second == [steps[1], f"{record} {second}"]
    with closing(SqlLedger(url)) as ledger:
        assert ledger.upgrade_schema() == (SCHEMA_VERSION, second)
        ledger.check_schema()
    assert "taskguard_a" in shape_of(engine)


@pytest.mark.parametrize("name", ["mariadb_url", "mysql_url"])
def test_a_step_that_stopped_anywhere_begins_again(
    request: pytest.FixtureRequest, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statement commits by itself there. `taskguard ledger upgrade` still finishes."""
    url = request.getfixturevalue(name)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    _create(url)
    _add_steps(
        monkeypatch,
        (
            "CREATE TABLE IF NOT EXISTS taskguard_colours (colour INTEGER NOT NULL)",
            "DELETE FROM taskguard_colours",
            "INSERT INTO taskguard_colours VALUES (7)",
            "ALTER TABLE taskguard_colours MODIFY colour BIGINT NOT NULL",
        ),
    )
    statements = upgrades.upgrade_statements(url, version=SCHEMA_VERSION)
    for last in range(len(statements) - 1):
        with engine.begin() as db:
            db.exec_driver_sql("drop table if exists taskguard_colours")
            db.exec_driver_sql(f"update taskguard_schema set version = {SCHEMA_VERSION}")
        with engine.begin() as db:
            for statement in statements[: last + 1]:
                db.exec_driver_sql(statement)
        assert main(["ledger", "upgrade", "--url", url]) == 0, statements[last]
        with engine.begin() as db:
            rows = db.exec_driver_sql("select colour from taskguard_colours").scalars().all()
        assert rows == [7]
        assert "BIGINT" in str(shape_of(engine)["taskguard_colours"])


@pytest.mark.parametrize(
    ("version", "message"),
    [(0, "before the first release"), (99, "newer library"), (None, "taskguard ledger create")],
)
def test_an_error_names_no_upgrade_if_there_is_none(
    sqlite_url: str, version: int | None, message: str
) -> None:
    """The tables are too old, newer than this library, or their creation was interrupted."""
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    engine = sa.create_engine(sqlite_url, poolclass=sa.NullPool)
    with engine.begin() as db:
        db.execute(sa.text("delete from taskguard_schema"))
        if version is not None:
            db.execute(sa.text(f"insert into taskguard_schema values ({version})"))
    for use in (ledger.check_schema, ledger.upgrade_schema, ledger.upgrade_statements):
        with pytest.raises(LedgerSchemaError, match=message) as caught:
            use()
        assert "ledger upgrade" not in str(caught.value)
    ledger.close()


def test_every_version_since_the_first_has_its_step() -> None:
    """A change of a table after the release needs an upgrade for each kind of database."""
    assert [step.to for step in upgrades.STEPS] == list(
        range(FIRST_VERSION + 1, SCHEMA_VERSION + 1)
    )
    for step in upgrades.STEPS:
        assert set(step.statements) == set(KINDS)
        assert step.why
