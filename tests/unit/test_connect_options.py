"""Connect options of a database's URL, environment or service file win over the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from taskguard.doctor import GuardedTask
from taskguard.doctor.ledger import check_ledger
from taskguard.integration import Policy
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.engine import hosts_of
from taskguard.ledger.sql import SqlLedger
from taskguard.lock_table import TableLocks

PG = "postgresql+psycopg://u:p@h1/d"
DEFAULTS = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


class NeverError(Exception):
    """There is no server to connect to."""


def connecting(made: Any) -> dict[str, Any]:
    """The arguments by which a database's driver is asked to connect."""
    engine = made if isinstance(made, sa.Engine) else Database(made, lock_timeout_s=1.0).engine
    asked: dict[str, Any] = {}

    def note(_dialect: Any, _record: Any, _args: Any, arguments: dict[str, Any]) -> None:
        asked.update(arguments)
        raise NeverError

    sa.event.listen(engine, "do_connect", note)
    with pytest.raises(NeverError):
        engine.connect()
    return asked


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PGCONNECT_TIMEOUT", "PGSERVICE", "PGSYSCONFDIR", "PGHOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))


def known(asked: dict[str, Any]) -> dict[str, str]:
    return {name: str(asked[name]) for name in DEFAULTS if name in asked}


def with_defaults(**options: object) -> dict[str, str]:
    return {name: str(value) for name, value in (DEFAULTS | options).items()}


def test_defaults_are_bounded() -> None:
    """A URL without options gets bounded time-outs."""
    assert known(connecting(PG)) == with_defaults()


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_url_wins(name: str) -> None:
    """Each option of the URL replaces its default alone."""
    assert known(connecting(f"{PG}?{name}=7")) == with_defaults(**{name: 7})


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """PGCONNECT_TIMEOUT replaces the default, and an option of the URL replaces both."""
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "9")
    assert "connect_timeout" not in connecting(PG)
    assert connecting(f"{PG}?connect_timeout=3")["connect_timeout"] == "3"


@pytest.mark.parametrize("by", ["url", "environment"])
def test_a_service_file_wins(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the URL's own service win. psycopg ignores its connect_timeout, so taskguard
    passes it on."""
    assert hosts_of(sa.make_url("postgresql+psycopg:///d")) == [""]
    (tmp_path / "services").write_text(
        "[other]\nkeepalives=0\n# a comment\n[shop]\nhost=db,db2\nconnect_timeout=11\n"
        "tcp_user_timeout = 1000\n\n[last]\nkeepalives_idle=1\n"
    )
    url = "postgresql+psycopg:///d"
    if by == "environment":
        monkeypatch.setenv("PGSERVICE", "shop")
    else:
        url += "?service=shop"
    expected = with_defaults(connect_timeout=11)
    del expected["tcp_user_timeout"]
    assert known(connecting(url)) == expected
    assert hosts_of(sa.make_url(url)) == ["db", "db2"]


@pytest.mark.parametrize(
    ("url", "each_s"),
    [
        ("postgresql+psycopg://u@/d?host=a:1&host=b:2", 2),
        ("postgresql+psycopg://u@/d?host=a&host=b&host=c", 2),
        ("postgresql+psycopg://u@/d?host=a,b", 2),
        ("postgresql+psycopg://u@a/d", 5),
        ("postgresql+psycopg://u@/d?host=/socket", 5),
    ],
)
def test_all_hosts_share_the_time(url: str, each_s: int) -> None:
    """Several hosts share the time, so that a silent first host leaves time for the others. libpq
    waits for two seconds at least."""
    assert connecting(url)["connect_timeout"] == each_s


@pytest.mark.parametrize(
    ("query", "takes_s"),
    [
        ("", 0.0),
        ("host=a", 0.0),
        ("host=a&host=b", 2.0),
        ("host=a&host=b&host=c", 4.0),
        ("host=a&host=b&connect_timeout=10", 10.0),
        ("host=a&host=b&connect_timeout=1", 2.0),
        ("host=a&host=b&connect_timeout=0", 130.0),
        ("host=a&host=b&connect_timeout=soon", 0.0),
    ],
)
def test_how_long_a_failover_takes(query: str, takes_s: float) -> None:
    """A failover takes until the last host was tried. Locks in a table have this time among their
    traits."""
    url = f"postgresql+psycopg:///d?{query}"
    assert Database(url, lock_timeout_s=1.0).failover_s == takes_s
    assert TableLocks(url).traits.failover_s == takes_s


def test_leases_that_are_shorter_are_found() -> None:
    """Worker starts and `taskguard doctor` find shorter leases, whether the database answers or
    not."""
    ledger = SqlLedger("postgresql+psycopg:///d?host=/no/a&host=/no/b&connect_timeout=4")
    tasks = [GuardedTask("short", Policy(ttl_s=5.0)), GuardedTask("long", Policy(ttl_s=30.0))]
    found, answers = check_ledger(ledger, tasks)
    assert not answers
    assert [each.name for each in found] == ["ledger_away", "ttl_below_connect"]
    assert found[1].where == "the tasks short"
    assert "takes 4 s" in found[1].what
    assert found[1].fix.startswith("Set ttl_s=6 or more")
    assert [each.name for each in check_ledger(ledger, tasks[1:])[0]] == ["ledger_away"]


@pytest.mark.parametrize("name", ["connect_timeout", "read_timeout", "write_timeout"])
def test_the_url_of_a_mariadb_wins(name: str) -> None:
    """On MariaDB an option of the URL replaces the default."""
    asked = connecting(f"mariadb+pymysql://u@h/d?{name}=7")
    assert asked[name] == 7
    others = {"connect_timeout", "read_timeout"} - {name}
    assert {asked[other] for other in others} == {5}


def test_the_url_of_a_sqlite_wins() -> None:
    """On SQLite `timeout=` of the URL replaces the default."""
    assert connecting("sqlite:///shop.db?timeout=20")["timeout"] == 20.0
    assert connecting("sqlite:///shop.db")["timeout"] == 5.0
