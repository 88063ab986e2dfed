"""The contract suite detects tables of locks with a check left out.

As for ledgers (`tests/contract/ledger/test_mutants.py`), a mutant counts as caught only if an
assertion failed. A statement that the server rejects is the mutant's own mistake, and fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import sqlalchemy as sa

from pytest_taskguard.lock_contract import contention, leases, sharing, waits
from pytest_taskguard.lock_contract.server import KEY, TWO, granted, renewed, take
from pytest_taskguard.lock_contract.sharing import comes_in
from support.lock_servers import LockServer
from taskguard.lock_table import TableLocks, mysql, postgresql
from taskguard.locks.base import Granted, Held, Renewal
from taskguard.model.lease import new_owner

pytestmark = pytest.mark.once

ASSERTIONS = (AssertionError, pytest.fail.Exception)
Test = Callable[[TableLocks, LockServer], object]

shares = sharing.TestSharing()

# Text of a statement, and its replacement in the mutant. The statement must contain all texts.
Changes = list[tuple[str, str]]

_WANTED = "when l.wanted_until > extract(epoch from clock_timestamp()) * 1000000"
_REFUSAL = "where l.key = any (asked) and l.owner <> me and l.until > now_us"


def tokens_beyond_the_clock(locks: TableLocks, server: LockServer) -> None:
    """If the clock was set back or a token comes from elsewhere, the next token is still higher."""
    assert server.url is not None
    take(locks, ("a",), first := new_owner("m"), with_fence=True)
    locks.release(("a",), first)
    ahead = 10**16
    engine = sa.create_engine(server.url, poolclass=sa.NullPool)
    with engine.begin() as db:
        db.exec_driver_sql(f"update taskguard_locks set fence = {ahead}")
    both = take(locks, ("a", "b"), second := new_owner("n"), with_fence=True)
    assert isinstance(both, Granted)
    assert both.fence > ahead
    server.connect().release(("a", "b"), second)
    for key in ("a", "b"):
        alone = take(locks, (key,), third := new_owner("o"), with_fence=True)
        assert isinstance(alone, Granted)
        assert alone.fence > both.fence
        locks.release((key,), third)


def asked_twice(locks: TableLocks, server: LockServer) -> None:
    """A repeated acquire of one key is one grant. Several keys use another statement."""
    owner = new_owner("m")
    first = granted(locks, KEY, owner, with_fence=True)
    assert first.fence == granted(server.connect(), KEY, owner, with_fence=True).fence


def shares_asked_twice(locks: TableLocks, server: LockServer) -> None:
    """A repeated acquire of one owner is granted even if no slot is free."""
    first, second = new_owner("m"), new_owner("n")
    assert comes_in(locks, KEY, first, 2)
    assert comes_in(locks, KEY, second, 2)
    assert comes_in(server.connect(), KEY, first, 2)


def after_its_end(locks: TableLocks, _: LockServer) -> None:
    """An expired lease is gone, even if no other owner has taken its key."""
    owner = new_owner("m")
    granted(locks, KEY, owner, ttl_s=0.05)
    time.sleep(0.1)
    assert renewed(locks, KEY, owner) == Renewal.GONE


def taken(locks: TableLocks, server: LockServer) -> None:
    leases.TestAcquire().test_taken(locks, server)


def taken_with_a_token(locks: TableLocks, _: LockServer) -> None:
    """Run `taken` without a ledger."""
    granted(locks, KEY, new_owner("m"), with_fence=True)
    assert isinstance(take(locks, KEY, new_owner("n"), with_fence=True), Held)


def freed_by_another_with_a_token(locks: TableLocks, _: LockServer) -> None:
    """Run `TestRelease.test_by_another` without a ledger."""
    granted(locks, KEY, holder := new_owner("m"), with_fence=True)
    assert locks.release(KEY, new_owner("m")) is False
    assert renewed(locks, KEY, holder) == Renewal.RENEWED


def tokens_of_another_mind(locks: TableLocks, server: LockServer) -> None:
    """A release of a lock with a token keeps the token after a lock without one was taken."""
    granted(locks, KEY, owner := new_owner("m"), with_fence=True)
    assert server.url is not None
    with sa.create_engine(server.url, poolclass=sa.NullPool).begin() as db:
        db.exec_driver_sql(f"update taskguard_locks set fence = {10**16}")
    granted(locks, ("another",), new_owner("n"))
    assert locks.release(KEY, owner)
    assert granted(locks, KEY, new_owner("o"), with_fence=True).fence > 10**16


def woken_of(locks: TableLocks, server: LockServer, *, keys: tuple[str, ...], token: bool) -> None:
    """Run `TestWait.test_woken` with several keys, or without a ledger."""
    waiter, me = server.connect(), new_owner("n")

    def wait() -> float:
        granted(locks, keys, holder := new_owner("m"), with_fence=token)
        assert isinstance(take(waiter, keys, me, wait_s=30.0), Held)
        woken = waits.Ended(lambda: waiter.wait(keys[0], me, timeout_s=30.0))
        time.sleep(0.1)  # until it blocks
        locks.release(keys, holder)
        woken.join()
        return woken.took_s

    wait()  # through new connections
    assert waits.within(0.6, wait)


POSTGRESQL: list[tuple[str, Changes, Test]] = [
    (
        "take",
        [(_REFUSAL, "where false"), ("where l.owner = me or l.until <= now_us", "")],
        taken,
    ),
    (
        "take",
        [(_REFUSAL, f"{_REFUSAL} and cardinality(asked) = 1"), ("is_taken or there", "there")],
        lambda locks, _: leases.TestAcquire().test_all_or_none(locks),
    ),
    (
        "take",
        [("else greatest(l.fence + 1, now_us)", "else l.fence")],
        lambda locks, _: leases.TestTokens().test_grow(locks),
    ),
    ("take", [("else greatest(l.fence + 1, now_us)", "else now_us")], tokens_beyond_the_clock),
    ("take", [("greatest(last + 1, now_us)", "now_us")], tokens_beyond_the_clock),
    ("take", [("max(l.fence)", "min(l.fence)")], tokens_beyond_the_clock),
    (
        "take",
        [("when l.owner = me and l.until > now_us and l.fence > 0 then", "when false then")],
        asked_twice,
    ),
    (
        "take",
        [("set wanted_until = now_us + waits_us", "set wanted_until = 0")],
        lambda locks, server: waits.TestWait().test_woken(locks, server),
    ),
    (
        "take",
        [("where l.key = asked[1] and (l.owner = me or l.until <= now_us)", "where true")],
        taken_with_a_token,
    ),
    (
        "free",
        [("and l.owner = %(owner)s::text", "")],
        lambda locks, _: leases.TestRelease().test_partly(locks),
    ),
    ("free", [("and l.fence = 0", ""), ("and l.fence > 0", "and false")], tokens_beyond_the_clock),
    (
        "free",
        [("when l.is_wanted then", "when false then")],
        lambda locks, server: woken_of(locks, server, keys=TWO, token=False),
    ),
    (
        "free_one",
        [("and l.owner = %(owner)s::text", "")],
        lambda locks, _: leases.TestRelease().test_by_another(locks),
    ),
    (
        "free_one",
        [("and l.fence = 0", "")],
        tokens_of_another_mind,
    ),
    (
        "free_one",
        [(_WANTED, "when false")],
        lambda locks, server: waits.TestWait().test_woken(locks, server),
    ),
    (
        "free_one_and_keep",
        [("and l.owner = %(owner)s::text", "")],
        freed_by_another_with_a_token,
    ),
    (
        "free_one_and_keep",
        [(_WANTED, "when false")],
        lambda locks, server: woken_of(locks, server, keys=KEY, token=True),
    ),
    (
        "hand_over",
        [("and l.owner = me and", "and")],
        lambda locks, _: leases.TestHandOver().test_by_another(locks),
    ),
    (
        "hand_over",
        [("return already + handed", "return handed")],
        lambda locks, _: leases.TestHandOver().test_twice(locks),
    ),
    (
        "renew",
        [("when bool_or(l.owner <> m.owner and l.until > now_us) then 'T'", "when false then 'T'")],
        lambda locks, _: leases.TestRenew().test_answers(locks),
    ),
    (
        "renew",
        [("bool_or(l.key is null or", "bool_and(l.key is null or")],
        lambda locks, _: leases.TestRenew().test_answers(locks),
    ),
    (
        "renew",
        [("l.key is null or l.until <= now_us", "l.key is null")],
        after_its_end,
    ),
    (
        "renew",
        [("set until = now_us + m.ttl_us", "set until = l.until")],
        lambda locks, _: leases.TestRenew().test_extends(locks),
    ),
    ("share", [(">= most", "> most")], shares.test_limit),
    (
        "share",
        [("if left(l.owner, 1) <> '{' and l.until > now_us then", "if false then")],
        lambda locks, _: shares.test_readers(locks),
    ),
    (
        "share",
        [("where s.value::bigint > now_us;", ";")],
        lambda locks, _: shares.test_runs_out(locks),
    ),
    (
        "share",
        [("elsif not shares ? me and", "elsif")],
        shares_asked_twice,
    ),
    (
        "share",
        [("when shares = '{}' or l.fence = 0 then", "when true then")],
        lambda locks, _: shares.test_tokens(locks),
    ),
    (
        "share",
        [("when shares = '{}' or l.fence = 0 then", "when l.fence = 0 then")],
        lambda locks, _: shares.test_tokens(locks),
    ),
    (
        "share",
        [("until = last_us,", "until = now_us + ttl_us,")],
        lambda locks, _: shares.test_shorter_leases(locks),
    ),
    (
        "share",
        [("set wanted_until = now_us + waits_us", "set wanted_until = 0")],
        shares.test_woken,
    ),
    (
        "unshare",
        [("if l.wanted_until > now_us then", "if false then")],
        shares.test_woken,
    ),
    (
        "unshare",
        [("where s.key <> me and", "where")],
        shares.test_limit,
    ),
    (
        "unshare",
        [("until = coalesce(last_us, 0)", "until = k.until")],
        lambda locks, _: shares.test_readers(locks),
    ),
    (
        "unshare",
        [("coalesce((l.owner::jsonb ->> me)::bigint, 0) <= now_us", "false")],
        shares.test_released,
    ),
    (
        "renew_shares",
        [("(l.owner::jsonb ->> one.me)::bigint > now_us", "l.owner::jsonb ? one.me")],
        lambda locks, _: shares.test_renewal_creates_nothing(locks),
    ),
    (
        "renew_shares",
        [("(l.owner::jsonb ->> one.me)::bigint > now_us", "l.until > now_us")],
        lambda locks, _: shares.test_renewed(locks),
    ),
    (
        "renew_shares",
        [("jsonb_build_object(one.me, (now_us + one.ttl_us)::text)", "'{}'")],
        lambda locks, _: shares.test_renewed(locks),
    ),
    (
        "renew_shares",
        [("greatest(l.until, now_us + one.ttl_us)", "now_us + one.ttl_us")],
        lambda locks, _: shares.test_shorter_leases(locks),
    ),
]


MYSQL: list[tuple[tuple[str, ...], Changes, Test]] = [
    (
        ("_TAKE", "_TAKE_AND_SEE"),
        [("owner = if(until > {now}, owner, %(owner)s)", "owner = %(owner)s")],
        taken,
    ),
    (
        ("_TAKE", "_TAKE_AND_SEE"),
        [("greatest(fence + 1, {now})", "fence")],
        lambda locks, _: leases.TestTokens().test_grow(locks),
    ),
    (
        ("_TAKE", "_TAKE_AND_SEE"),
        [("greatest(fence + 1, {now})", "{now}")],
        tokens_beyond_the_clock,
    ),
    (
        ("_TAKE", "_TAKE_AND_SEE"),
        [("(owner <> %(owner)s or fence > 0)", "owner <> %(owner)s")],
        asked_twice,
    ),
    (
        ("_TAKE", "_TAKE_AND_SEE"),
        [("until = if(owner = %(owner)s, {now} + %(ttl_us)s, until)", "until = until")],
        lambda locks, _: leases.TestAcquire().test_asked_twice_extends(locks),
    ),
    (
        ("_FREE_AND_KEEP", "_FREE"),
        [("and owner = %(owner)s", "")],
        lambda locks, _: leases.TestRelease().test_by_another(locks),
    ),
    (("_FREE",), [("and fence = 0", "")], tokens_beyond_the_clock),
    (
        ("_HAND_OVER",),
        [("and owner = %(owner)s", "")],
        lambda locks, _: leases.TestHandOver().test_by_another(locks),
    ),
    (
        ("_RENEW",),
        [("until = values(until)", "until = until")],
        lambda locks, _: leases.TestRenew().test_extends(locks),
    ),
    (("_TAKE_ROWS",), [("greatest(fence, %(token)s)", "fence")], tokens_beyond_the_clock),
    (
        ("_CHANGE",),
        [("owner = %(owner)s, ", "")],
        lambda locks, _: shares.test_readers(locks),
    ),
    (
        ("_CHANGE",),
        [("until = %(until)s", "until = until")],
        lambda locks, _: shares.test_readers(locks),
    ),
    (
        ("_CHANGE",),
        [("fence = %(fence)s", "fence = fence")],
        lambda locks, _: shares.test_tokens(locks),
    ),
]


@pytest.fixture
def locks(server: LockServer) -> Iterator[Any]:
    with closing(server.connect()) as made:
        yield made


@pytest.mark.parametrize("server", ["pg_table"], indirect=True)
@pytest.mark.parametrize(("name", "changes", "test"), POSTGRESQL)
def test_on_postgresql(
    server: LockServer,
    locks: TableLocks,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: Changes,
    test: Test,
) -> None:
    """The suite's test passes, and fails with the mutant."""
    test(locks, server)
    server.forget()
    _, *functions = postgresql.ddl_statements(unlogged=False)
    statement = f"_{name.upper()}" if name.startswith("free") else ""
    if statement:
        original = getattr(postgresql, statement)
    else:
        (original,) = [each for each in functions if f"taskguard_locks_{name}_1(" in each]
    text = original
    for old, new in changes:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    with ExitStack() as afterwards:
        if statement:
            monkeypatch.setattr(postgresql, statement, text)
        else:
            _define(server, text)
            afterwards.callback(_define, server, original)  # for later tests with this database
        with pytest.raises(ASSERTIONS):
            test(locks, server)


def _define(server: LockServer, function: str) -> None:
    assert server.url is not None
    with sa.create_engine(server.url, poolclass=sa.NullPool).begin() as db:
        db.exec_driver_sql(function.replace("%", "%%"))


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("mariadb_table", marks=pytest.mark.debian),
        pytest.param("mysql_table", marks=pytest.mark.debian),
    ],
    indirect=True,
)
@pytest.mark.parametrize(("names", "changes", "test"), MYSQL)
def test_on_mysql_kinds(
    server: LockServer,
    locks: TableLocks,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    changes: Changes,
    test: Test,
) -> None:
    """The suite's test passes, and fails with the mutant."""
    test(locks, server)
    server.forget()
    for name in names:
        text = getattr(mysql, name)
        for old, new in changes:
            found, made = old.replace("{now}", mysql._NOW), new.replace("{now}", mysql._NOW)
            assert found in text, f"{name} has no {found!r}"
            text = text.replace(found, made)
        monkeypatch.setattr(mysql, name, text)
    with pytest.raises(ASSERTIONS):
        test(locks, server)


@pytest.mark.debian
@pytest.mark.parametrize("server", ["mariadb_table"], indirect=True)
def test_without_all_or_none_on_mysql_kinds(
    server: LockServer, locks: TableLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant that grants several keys, whatever their holders, is detected."""
    monkeypatch.setattr(mysql._Row, "is_held", property(lambda self: False, lambda self, _: None))
    with pytest.raises(ASSERTIONS):
        leases.TestAcquire().test_all_or_none(locks)


@pytest.mark.parametrize(
    "server",
    ["pg_table", pytest.param("mariadb_table", marks=pytest.mark.debian)],
    indirect=True,
)
def test_sets_of_keys_in_a_ring(server: LockServer, locks: TableLocks) -> None:
    """Requests for overlapping sets of keys all succeed. If the rows were not sorted, the database
    would report a deadlock."""
    contention.TestContention().test_overlapping_sets(locks)
