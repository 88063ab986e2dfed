"""How a ledger connects to its database: URLs, Engines of the user, drivers, tables, forks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.ext.asyncio import create_async_engine

import taskguard
from support.claims import request
from support.claims import request as a_request
from taskguard.cli import main
from taskguard.errors import (
    ConfigurationError,
    LedgerSchemaError,
    LedgerUnavailableError,
)
from taskguard.ledger.schema.creation import ddl
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import Claimed
from taskguard.settings import make_ledger, make_locks
from taskguard_sandbox.servers import free_port


@pytest.mark.parametrize("url", ["postgresql//shop:secret@h", "postgresql://u:secret@h:x/d", ""])
def test_a_url_that_cannot_be_read_is_reported_without_its_password(url: str) -> None:
    """The error of an unreadable URL shows the correct form, and no password."""
    with pytest.raises(ConfigurationError, match=r"postgresql\+psycopg://") as caught:
        make_ledger(url)
    assert "secret" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    "password",
    ["s3cr@et", "s3cr@et/rest", "@s3cret", "s3/cr@et", "s3?cr@et", "s3cr:e@t", "s3@cret#"],
)
@pytest.mark.parametrize("kind", ["postgresql+psycopg", "mariadb+pymysql"])
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(kind: str, password: str) -> None:
    """A password with an unescaped @ is refused, because its rest would appear as the host in
    messages and logs."""
    url = f"{kind}://shop:{password}@127.0.0.1:1/shop"
    with pytest.raises(ConfigurationError, match=r"percent-encoded") as caught:
        make_ledger(url)
    with pytest.raises(ConfigurationError, match=r"percent-encoded") as printed:
        ddl(url)
    for error in (caught.value, printed.value):
        said = f"{error} {error.__cause__!r}"
        assert not [
            piece for piece in re.split(r"\W", password) if len(piece) > 1 and piece in said
        ]
    encoded = f"{kind}://shop:{quote(password, safe='')}@127.0.0.1:1/shop"
    with pytest.raises(LedgerUnavailableError, match=r"127\.0\.0\.1"):
        SqlLedger(encoded).claim(request())


@pytest.mark.parametrize(
    "url", ["s3cret@localhost:6379/0", "s3cret@host://x", "user:s3cret@localhost", "s3cret"]
)
def test_a_lock_servers_url_without_a_scheme_is_not_shown(url: str) -> None:
    """A URL without a scheme is not shown, because the text before its first colon may be the
    password."""
    with pytest.raises(ConfigurationError, match="redis, rediss, valkey") as caught:
        make_locks(url)
    assert "s3cret" not in str(caught.value)


def test_a_sqlite_file_may_have_an_at_sign_in_its_name(tmp_path: Path) -> None:
    """A SQLite URL has no user and no password, so its file may have an @ in its name."""
    ledger = SqlLedger(f"sqlite:///{tmp_path / 'shop@home.sqlite'}")
    ledger.create_schema()
    assert isinstance(ledger.claim(request()), Claimed)
    ledger.close()


@pytest.mark.parametrize(
    ("url", "works"),
    [
        ("postgresql+asyncpg://u:s3cret@h/d", r"postgresql\+psycopg://u:\*\*\*@h/d"),
        ("mysql+aiomysql://u:s3cret@h/d", r"mysql\+pymysql://u:\*\*\*@h/d"),
        ("mysql+asyncmy://h/d", r"mysql\+pymysql://h/d"),
        ("sqlite+aiosqlite:///d", r"sqlite:///d"),
    ],
)
def test_a_driver_that_is_awaited_is_refused_with_the_url_that_works(url: str, works: str) -> None:
    """An asynchronous driver is refused at once, whether or not it is installed. Its first call
    would be a TypeError."""
    with pytest.raises(ConfigurationError, match=works) as caught:
        make_ledger(url)
    assert "s3cret" not in str(caught.value)


def test_an_engine_that_is_awaited_is_refused_with_the_url_that_works() -> None:
    """An asynchronous Engine is refused like its URL."""
    engine = create_async_engine("postgresql+psycopg_async://u:s3cret@h/d")
    for each in (engine, engine.sync_engine):
        with pytest.raises(ConfigurationError, match=r"postgresql\+psycopg://u:\*\*\*@h/d"):
            make_ledger(each)


def test_another_kind_of_database_is_named() -> None:
    """An unsupported kind of database is named, with the supported ones."""
    with pytest.raises(ConfigurationError, match=r"oracle.*postgresql.*mariadb.*mysql.*sqlite"):
        make_ledger("oracle://h/d")


def test_a_database_that_is_not_there_says_where_without_the_password() -> None:
    """The error names host and database, but no user or password."""
    ledger = SqlLedger("postgresql+psycopg://shop:secret@127.0.0.1:1/shop")
    with pytest.raises(LedgerUnavailableError, match=r"127\.0\.0\.1") as caught:
        ledger.claim(request())
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(ledger)


@pytest.mark.parametrize("kind", ["postgres", pytest.param("mariadb", marks=pytest.mark.debian)])
def test_a_database_that_cannot_be_had_names_port_and_cause(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """A closed port, a missing database and a wrong password each name their port and cause."""
    url = sa.make_url(request.getfixturevalue("pg_url" if kind == "postgres" else "mariadb_url"))
    nobody = free_port()
    for wrong, said in (
        (url.set(port=nobody), rf":{nobody}/.*refused"),
        (url.set(database="nosuch"), rf":{url.port}/nosuch .*(does not exist|Unknown database)"),
    ):
        # The servers of these tests need no password; MariaDB refuses an unnecessary one.
        ledger = SqlLedger(wrong.set(password="s3cret") if kind == "postgres" else wrong)
        with pytest.raises(LedgerUnavailableError, match=said) as caught:
            ledger.claim(a_request())
        assert "s3cret" not in str(caught.value)
        assert "gave no answer" not in str(caught.value)
        assert "\n" not in str(caught.value)
        ledger.close()


def test_missing_tables_name_the_command(url: str) -> None:
    """The check at a start, and a claim, raise taskguard's error, not the driver's."""
    ledger = SqlLedger(url)
    for ask in (ledger.check_schema, lambda: ledger.claim(request())):
        with pytest.raises(LedgerSchemaError, match="taskguard ledger create"):
            ask()
    ledger.create_schema()
    ledger.create_schema()
    ledger.check_schema()
    ledger.close()


def test_alembics_autogenerate_leaves_the_ledgers_tables(sqlite_url: str) -> None:
    """With `include_name=taskguard.include_name`; without it, each would be dropped."""
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    ledger.close()
    models = sa.MetaData()
    sa.Table("orders", models, sa.Column("id", sa.Integer, primary_key=True))
    engine = sa.create_engine(sqlite_url)

    def found(**options: Any) -> set[tuple[str, str]]:
        with engine.connect() as db:
            context = MigrationContext.configure(db, opts=options)
            changes = compare_metadata(context, models)
            return {(change[0], change[1].name) for change in changes}

    with engine.begin() as db:
        db.execute(sa.text("create table forgotten (id int)"))
    dropped = {name for change, name in found() if change == "remove_table"}
    assert dropped >= {"taskguard_work", "taskguard_keys", "forgotten"}
    left = found(include_name=taskguard.include_name)
    assert left == {("add_table", "orders"), ("remove_table", "forgotten")}
    engine.dispose()


def test_the_printed_tables_are_those_that_are_created(url: str) -> None:
    """`taskguard ledger create --sql`, run by a person, gives a ledger that works."""
    engine = sa.create_engine(url)
    with engine.begin() as db:
        for statement in ddl(url).split(";\n"):
            if statement.strip():
                db.exec_driver_sql(statement)
    engine.dispose()
    ledger = SqlLedger(url)
    ledger.check_schema()
    claimed = ledger.claim(request())
    assert isinstance(claimed, Claimed)
    ledger.complete_alone(claimed.claim, None)
    ledger.close()


def test_the_printed_tables_of_mysql() -> None:
    """MySQL's collation without padding has a name of its own."""
    printed = ddl("mysql+pymysql://")
    assert "utf8mb4_0900_bin" in printed
    assert "nopad" not in printed
    assert "ENGINE=InnoDB" in printed


@pytest.mark.parametrize("by", ["--url", "the environment"])
def test_the_command_creates_the_tables_and_asked_again_does_nothing(
    pg_url: str, by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`taskguard ledger create` makes a working ledger, and does nothing the second time. Without a
    URL it names the variable."""
    monkeypatch.delenv("TASKGUARD_LEDGER_URL", raising=False)
    assert main(["ledger", "create"]) == 1
    assert "TASKGUARD_LEDGER_URL" in capsys.readouterr().err
    if by == "the environment":
        monkeypatch.setenv("TASKGUARD_LEDGER_URL", pg_url)
    options = ["--url", pg_url] if by == "--url" else []
    for _ in range(2):
        assert main(["ledger", "create", *options]) == 0
        assert "created" in capsys.readouterr().out
    ledger = SqlLedger(pg_url)
    ledger.check_schema()
    assert isinstance(ledger.claim(request()), Claimed)
    ledger.close()
    assert main(["ledger", "create", "--sql", "--url", pg_url]) == 0
    assert "CREATE TABLE taskguard_work" in capsys.readouterr().out


def test_an_engine_of_the_users_own_is_taken_as_it_is(pg_url: str) -> None:
    """A user's Engine keeps its pool and isolation level. With SERIALIZABLE, conflicts are busy."""
    engine = sa.create_engine(pg_url, isolation_level="SERIALIZABLE", pool_size=1, max_overflow=0)
    ledger = SqlLedger(engine)
    ledger.create_schema()
    claimed = ledger.claim(request())
    assert isinstance(claimed, Claimed)
    with ledger.transaction(claimed.claim) as tx:
        level = tx.db.execute(sa.text("show transaction_isolation")).scalar()
        tx.complete_in_block(claimed.claim, None)
    assert level == "serializable"
    assert engine.pool.checkedout() == 0
    engine.dispose()


def test_an_engine_that_commits_each_statement_is_refused(pg_url: str) -> None:
    """Effects and DONE could not commit together on it."""
    engine = sa.create_engine(pg_url, isolation_level="AUTOCOMMIT")
    ledger = SqlLedger(engine)
    ledger.create_schema()
    claimed = ledger.claim(request())
    assert isinstance(claimed, Claimed)
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"), ledger.transaction(claimed.claim):
        pass
    engine.dispose()


@pytest.mark.parametrize("own_engine", [False, True])
def test_a_forked_child_has_connections_of_its_own(pg_url: str, own_engine: bool) -> None:
    """Parent and child claim at the same time; neither reads the other's answers."""
    ledger = SqlLedger(sa.create_engine(pg_url) if own_engine else pg_url)
    ledger.create_schema()
    assert isinstance(ledger.claim(request(0)), Claimed)
    child = os.fork()
    if child == 0:
        wrong = 1
        try:
            wrong = sum(not _claims(ledger, number) for number in range(1, 100, 2))
        finally:
            os._exit(min(wrong, 255))
    assert all(_claims(ledger, number) for number in range(2, 100, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ledger.close()


def _claims(ledger: SqlLedger, number: int) -> bool:
    answer: Any = ledger.claim(request(number))
    return isinstance(answer, Claimed) and answer.claim.keys == (f"order:{number}",)
