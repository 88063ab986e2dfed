"""A key whose holder is gone is released by an operator: locks alone, with a ledger, from a
shell."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from platform import node
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.guarded_shop import GuardedShop
from taskguard import Guard
from taskguard.cli import main
from taskguard.errors import (
    ConfigurationError,
    KeyBusyError,
    LeaseLostError,
    LockServerUnavailableError,
    StaleTokenError,
)
from taskguard.locks import MemoryLocks
from taskguard.model.lease import Owner, new_owner

KEY = "inventory:42"
HOLDS = """
import sys, time, taskguard
tg = taskguard.connect(locks=sys.argv[1], ledger=None)
with tg.lock("inventory:42", ttl_s=600):
    print("held", flush=True)
    time.sleep(600)
"""
Connect = Callable[..., taskguard.TaskGuard]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make connections that are closed at the end."""
    made: list[taskguard.TaskGuard] = []

    def connect(locks: Any, ledger: Any = None, **options: Any) -> taskguard.TaskGuard:
        made.append(taskguard.connect(locks=locks, ledger=ledger, **options))
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def tg(connect: Connect) -> taskguard.TaskGuard:
    return connect(MemoryLocks())


def elsewhere(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call it as if from outside of the current lock or body."""
    return contextvars.Context().run(call, *args, **options)


def dead(locks: Any, key: str = KEY, *, limit: int = 1, message: str = "m") -> Owner:
    """Return the holder of a key that has vanished."""
    owner = new_owner(message)
    asked = {} if limit == 1 else {"limit": limit}
    locks.acquire((key,), owner, ttl_s=600.0, with_fence=True, wait_s=0.0, **asked)
    return owner


class TestLocksOnly:
    def test_a_holder_that_is_gone_loses_the_key(
        self, tg: taskguard.TaskGuard, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The caller need not know fence or owner. The log names the former process, and the
        reason."""
        holder = dead(tg.runner.locks)
        assert tg.release(KEY, reason="host web-3 is gone") is True
        with tg.lock(KEY):
            pass
        assert f"{KEY}: released from {holder.described}: host web-3 is gone" in caplog.text
        assert tg.release(KEY) is False

    def test_a_holder_that_lives_hears_of_it(self, tg: taskguard.TaskGuard) -> None:
        """A holder that is alive gets an error at the end of its block."""
        with pytest.raises(LeaseLostError), tg.lock(KEY, ttl_s=600.0):
            assert elsewhere(tg.release, KEY)

    def test_only_the_named_holder_loses_the_key(self, tg: taskguard.TaskGuard) -> None:
        """The holder is named by owner, nonce or fence. All given values have to match."""
        owner = dead(tg.runner.locks)
        [holder] = tg.runner.locks.holders(KEY)  # type: ignore[union-attr]
        fence = holder.fence
        assert not tg.release(KEY, owner=str(new_owner("m")))
        assert not tg.release(KEY, fence=fence - 1)
        assert not tg.release(KEY, owner=str(owner), fence=fence + 1)
        assert tg.release(KEY, owner=owner.nonce, fence=fence)
        owner = dead(tg.runner.locks)
        with pytest.raises(KeyBusyError) as busy, tg.lock(KEY):
            pass
        assert tg.release(KEY, owner=busy.value.owner)

    def test_a_shared_key_is_taken_from_all_or_from_one(self, tg: taskguard.TaskGuard) -> None:
        """A shared key is released for all its holders, or for the one that `owner=` names."""
        owners = [dead(tg.runner.locks, limit=3, message=f"m{number}") for number in range(3)]
        assert tg.release(KEY, owner=str(owners[0]))
        assert {each.owner for each in tg.released(KEY)} == set(owners[1:])
        with tg.lock(KEY):
            pass

    def test_what_taskguard_did_not_write_stays(self, tg: taskguard.TaskGuard) -> None:
        """Another application's value is not deleted, not even by its name."""
        locks = tg.runner.locks
        assert locks is not None
        other = Owner("cron job", "")
        locks.acquire((KEY,), other, ttl_s=600.0, with_fence=False, wait_s=0.0)
        assert not tg.release(KEY)
        assert not tg.release(KEY, owner=str(other))
        assert [each.owner for each in locks.holders(KEY)] == [other]

    def test_with_and_without_the_namespace(self, connect: Connect) -> None:
        """A key may be given with or without the namespace. Another application's key is never
        released."""
        locks = MemoryLocks()
        tg, other = connect(locks, namespace="shop"), connect(locks)
        with pytest.raises(LeaseLostError), tg.lock(KEY):
            theirs = dead(locks)
            assert elsewhere(tg.release, KEY)
            assert not elsewhere(tg.release, KEY)
        dead(locks, f"shop:{KEY}")
        assert tg.release(f"shop:{KEY}")
        assert [each.owner for each in locks.holders(KEY)] == [theirs]
        assert other.release(KEY)

    def test_as_lock_takes_it_and_as_errors_show_it(self, tg: taskguard.TaskGuard) -> None:
        """A key may be given as `tg.lock()` takes it, and as errors show it: escaped or
        shortened."""
        for key in ("a b/100%", "x" * 300):
            for shown in (False, True):
                with pytest.raises(LeaseLostError), tg.lock(key, ttl_s=600.0) as lease:
                    assert elsewhere(tg.release, lease.key if shown else key)
        with pytest.raises(ConfigurationError, match="needs a key"):
            tg.release("")

    def test_a_silent_lock_server_is_an_error(self, connect: Connect) -> None:
        """A silent lock server is an error, and the key is not reported as free."""
        tg = connect("redis://127.0.0.1:1")
        with pytest.raises(LockServerUnavailableError):
            tg.release(KEY)


class TestWithLedger:
    """On each kind of database."""

    @pytest.fixture
    def shop(self, url: str, make_shop: Callable[..., GuardedShop]) -> GuardedShop:
        return make_shop(url, locks=MemoryLocks())

    def test_both_are_released(self, shop: GuardedShop) -> None:
        """The next delivery runs at once, and the late holder's commit is refused."""
        runs: list[int] = []

        def body(guard: Guard) -> None:
            runs.append(guard.attempt)
            if guard.attempt == 1:
                assert elsewhere(shop.tg.release, guard.key, reason="gone")
                assert shop.tg.runner.locks.holders(guard.key) == []  # type: ignore[union-attr]
                elsewhere(shop.deliver, body, deferrals=1)
            with guard.transaction() as db:
                db.execute(sa.text("insert into effects values ('x')"))

        shop.deliver(body)
        assert (shop.effects, shop.states, runs) == (["x"], ["DONE"], [1, 2])
        assert "takeover" in shop.happened

    def test_all_keys_of_the_holder(self, shop: GuardedShop) -> None:
        """The ledger and the lock server free each key of a lock on several."""
        lock = shop.tg.lock("a", KEY, "z", ttl_s=600.0)
        assert lock.acquire()
        found = elsewhere(shop.tg.released, KEY)
        assert [each.key for each in found] == [KEY, "a", "z"]
        with pytest.raises(LeaseLostError):
            lock.release()
        with shop.tg.lock("a", KEY, "z"):
            pass

    def test_a_lock_that_only_the_lock_server_knows(self, shop: GuardedShop) -> None:
        """The lock of a reader, and of a holder that died before its claim, exist only at the lock
        server."""
        locks = shop.tg.runner.locks
        dead(locks)
        assert shop.tg.release(KEY)
        dead(locks, limit=1_000)
        assert shop.tg.release(KEY)
        assert not shop.tg.release(KEY)

    def test_all_slots_of_a_key(self, shop: GuardedShop) -> None:
        """The key is released for each holder of a slot, and their late commits are refused."""
        inside: list[str] = []

        @shop.tg.guarded(key="account:1", once_per="charge:<number>", limit=2)
        def charge(number: int, guard: Guard) -> None:
            inside.append(guard.key)
            if number == 1:
                elsewhere(charge, 2)
            else:
                assert len(shop.tg.released("account:1")) == 2

        with pytest.raises(StaleTokenError):
            charge(1)
        assert sorted(inside) == ["account:1#0", "account:1#1"]


def test_a_killed_holder_is_released_from_a_shell(
    redis_url: str, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a lock of ten minutes on Redis alone, the busy error names the process, the command
    releases the key, and a second release finds no holder."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, redis_url], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    tg = connect(redis_url)
    with pytest.raises(KeyBusyError, match=rf"pid {holder.pid}, for at most [56]"), tg.lock(KEY):
        pass
    command = ["keys", "release", KEY, "--locks", redis_url, "--reason", "killed"]
    assert main([*command, "--fence", "1"]) == 1
    assert "has no holder with this owner and fence" in capsys.readouterr().err
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{KEY}: released from worker ")
    assert f"pid {holder.pid}\n" in said
    with tg.lock(KEY):
        pass
    assert main(command) == 1
    assert capsys.readouterr().err == f"taskguard: {KEY} has no holder: nothing was released.\n"


def test_the_command_releases_in_a_ledger_as_well(
    url: str, make_shop: Callable[..., GuardedShop], capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--ledger` alone, the command releases a key in the ledger."""
    shop = make_shop(url)

    def body(guard: Guard) -> None:
        assert main(["keys", "release", "order:1", "--ledger", url, "--reason", "gone"]) == 0

    shop.deliver(body)
    assert f" on {node()}, pid {os.getpid()}, message m" in capsys.readouterr().out


def test_a_session_lock_is_its_sessions_own(pg_url: str, connect: Connect) -> None:
    """An advisory lock cannot be released. The error says that its session has to end."""
    scheme, _, rest = pg_url.partition("://")
    locks = f"{scheme.partition('+')[0]}+advisory://{rest}"
    first, second = connect(locks, pg_url), connect(locks, pg_url)
    first.ledger.create_schema()  # type: ignore[union-attr]
    with pytest.raises(LeaseLostError), first.lock(KEY):
        with pytest.raises(ConfigurationError, match="ends with its session"):
            elsewhere(second.release, KEY)
        assert elsewhere(first.release, KEY) is True
