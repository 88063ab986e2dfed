"""Workers have names in the ledger. Errors, events and log lines name holders by them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from platform import node
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support import claims
from support.guarded_shop import GuardedShop, write
from support.scripts import run_script
from support.waiting import wait_until
from taskguard import Guard
from taskguard.cli import main
from taskguard.errors import KeyBusyError, LedgerUnavailableError, WorkDeadError
from taskguard.events import Contended, Takeover
from taskguard.ledger.connections.libpq import Libpq
from taskguard.ledger.tables import KEYS, WORKERS
from taskguard.locks import MemoryLocks
from taskguard.model import workers
from taskguard.model.claims import Claimed
from taskguard.model.lease import Owner
from taskguard.model.workers import Worker
from taskguard.run import names
from taskguard.run.names import Names

OTHER = Worker("1f2e3d4c", "celery", "celery@web-3", "web-3", 4700, "default,mail", "0.1.0")
HOLDER = Owner(f"{OTHER.number}{4711:06x}0123456789", "m-1")
HOLDS = """
import sys, taskguard
tg = taskguard.connect(locks=None, ledger=sys.argv[1])
lock = tg.lock("order:1")
lock.acquire()
sys.stdout.flush()
import os
print(os.getpid(), flush=True)
os._exit(0)
"""


@pytest.fixture(autouse=True)
def a_worker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a new worker that knows no names."""
    monkeypatch.setattr(names, "_shared", names._Shared())
    monkeypatch.setattr(names, "nonces", workers.Nonces())
    monkeypatch.setattr(workers, "nonces", names.nonces)
    monkeypatch.setattr("taskguard.model.lease.nonces", names.nonces)
    monkeypatch.setattr(workers, "_described", ("plain", "", ""))


@contextlib.contextmanager
def statements(shop: GuardedShop, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note the statements of the ledger, also those that the driver gets without SQLAlchemy."""
    seen: list[str] = []

    def note(_db: Any, _cursor: Any, text: str, *_: Any) -> None:
        seen.append(text)

    def noted(send: Any) -> Any:
        def sending(self: Any, *args: Any, **options: Any) -> Any:
            seen.append("by libpq")
            return send(self, *args, **options)

        return sending

    with monkeypatch.context() as patch:
        for name in ("_rows", "_both"):
            patch.setattr(Libpq, name, noted(getattr(Libpq, name)))
        sa.event.listen(shop.ledger.database.engine, "before_cursor_execute", note)
        yield seen
        sa.event.remove(shop.ledger.database.engine, "before_cursor_execute", note)


def rows(shop: GuardedShop) -> list[Any]:
    with shop.engine.connect() as db:
        return list(db.execute(sa.select(WORKERS)))


def hold(shop: GuardedShop, owner: Owner = HOLDER) -> None:
    """Let another worker hold the key, as a worker of an older deploy does if it has no row."""
    claimed = shop.ledger.claim(claims.request(owner=owner))
    assert isinstance(claimed, Claimed)


def refusal(tg: taskguard.TaskGuard) -> KeyBusyError:
    with pytest.raises(KeyBusyError) as caught, tg.lock("order:1"):
        raise AssertionError("unreachable")
    return caught.value


class TestRows:
    """A worker has one row."""

    def test_the_first_claim_stores_the_worker(self, shop: GuardedShop) -> None:
        """The row names the program, the host and the process. A refused call stores nothing."""
        hold(shop)
        refusal(shop.tg)
        assert rows(shop) == []
        claims.end_leases(shop.engine)
        with shop.tg.lock("order:1"):
            pass
        [row] = rows(shop)
        assert (row.number, row.kind, row.host) == (names.nonces.number, "plain", node())
        assert (row.pid, row.version, row.queues) == (os.getpid(), taskguard.__version__, "")
        assert row.name in ("pytest", "__main__.py", "python", "-c", "execnet")
        assert 0 < row.started <= row.seen
        with shop.engine.connect() as db:
            owners = db.execute(sa.select(KEYS.c.fence)).scalars().all()
        assert len(owners) == 1

    def test_a_delivery_costs_no_statement_more(
        self, shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the first claim of a worker, each delivery has as many statements as without
        names. None of them is about workers."""

        def body(guard: Guard) -> None:
            with guard.transaction() as db:
                write(db)

        def sent(order: int) -> list[str]:
            with statements(shop, monkeypatch) as seen:
                shop.tg.guarded(key="order:<order>", once_per="key")(
                    lambda order, guard: body(guard)
                )(order)
            return seen

        monkeypatch.setattr(names.nonces, "registers", False)
        sent(1), sent(2)  # they connect, and prepare statements
        without = sent(3)
        monkeypatch.setattr(names.nonces, "registers", True)
        first, second, third = sent(4), sent(5), sent(6)
        assert without == second == third
        assert not any("taskguard_workers" in each for each in second)
        about = [each.split()[0].upper() for each in first if "taskguard_workers" in each]
        assert about == ["INSERT", "UPDATE"]

    def test_forked_children_have_their_parents_row(self, pg: GuardedShop) -> None:
        """A child has the number of its parent, and its own pid. It stores nothing, even if it was
        forked before the first claim, and another child has stored the row."""
        pg.ledger.close()
        seen: list[tuple[str, int]] = []
        for key in ("order:1", "order:2", "order:3"):
            receiver, sender = os.pipe()
            pid = os.fork()
            if pid == 0:
                with pg.tg.lock(key) as lease:
                    os.write(sender, str(lease.owner).encode())
                os._exit(0)
            os.close(sender)
            with os.fdopen(receiver) as found:
                owner = Owner.parse(found.read())
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert owner.named == (names.nonces.number, pid)
            [row] = rows(pg)
            seen.append((row.pid, row.seen))
        assert seen == [(os.getpid(), seen[0][1])] * 3

    def test_two_workers_with_one_number_get_different_ones(self, shop: GuardedShop) -> None:
        """The second one draws another number, and keeps the row of the first one as it is."""
        mine = names.nonces.number
        assert shop.ledger.register_worker(dataclasses.replace(OTHER, number=mine))
        with shop.tg.lock("order:1") as first:
            pass
        with shop.tg.lock("order:1") as second:
            pass
        assert first.owner.named[0] == mine
        assert second.owner.named[0] == names.nonces.number != mine
        assert {(row.number, row.host) for row in rows(shop)} == {
            (mine, OTHER.host),
            (names.nonces.number, node()),
        }

    def test_a_repeated_row_is_one_row(self, shop: GuardedShop) -> None:
        """An INSERT without an answer is repeated, and does not look like another worker's."""
        assert shop.ledger.register_worker(OTHER)
        assert shop.ledger.register_worker(OTHER)
        [row] = rows(shop)
        assert row.seen >= row.started
        assert not shop.ledger.register_worker(dataclasses.replace(OTHER, pid=1))
        assert not shop.ledger.register_worker(dataclasses.replace(OTHER, host="web-4"))
        assert shop.ledger.worker(OTHER.number) == OTHER

    def test_a_ledger_that_refuses_the_row_fails_nothing(
        self, shop: GuardedShop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The delivery goes on, and the next minute's tries again."""
        with shop.engine.begin() as db:
            WORKERS.drop(db)
        caplog.set_level(logging.DEBUG, "taskguard")
        for number in range(3):
            with shop.tg.lock(f"order:{number}"):
                pass
        assert caplog.text.count("was not stored") == 1

    def test_the_thread_that_renews_notes_that_the_worker_was_seen(
        self, shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if a purge has deleted the row."""
        monkeypatch.setattr(names, "SEEN_EVERY_S", 0.1)
        with shop.tg.lock("order:1", ttl_s=4.0):
            first = rows(shop)
            wait_until(lambda: rows(shop)[0].seen > first[0].seen, message="seen again")
            with shop.engine.begin() as db:
                db.execute(sa.delete(WORKERS))
            wait_until(lambda: rows(shop), message="stored again")
            monkeypatch.setattr(names, "SEEN_EVERY_S", 3600.0)
            known = shop.tg.runner.names
            # The thread uses no connection when the test ends.
            wait_until(lambda: known._again_at_s > time.monotonic() + 600, message="the last time")

    def test_a_purge_deletes_workers_that_were_not_seen(self, shop: GuardedShop) -> None:
        """The age counts from when the worker was last seen."""
        shop.ledger.register_worker(OTHER)
        shop.ledger.register_worker(dataclasses.replace(OTHER, number="00000001"))
        with shop.engine.begin() as db:
            old = sa.update(WORKERS).where(WORKERS.c.number == OTHER.number)
            db.execute(old.values(seen=WORKERS.c.seen - 7_200_000_000))
        assert shop.ledger.purge(older_than_s=86_400).workers == 0
        assert shop.ledger.purge(older_than_s=3_600).workers == 1
        assert [row.number for row in rows(shop)] == ["00000001"]


class TestNames:
    """A holder is named by its worker and pid."""

    def test_a_refusal_names_the_holder(
        self, shop: GuardedShop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """So do the event, and the log line at DEBUG."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        caplog.set_level(logging.DEBUG, "taskguard")
        text = "celery@web-3, pid 4711, message m-1"
        assert f"order:1 is held by {text}, for at most" in str(refusal(shop.tg))
        [event] = [each for each in shop.events if isinstance(each, Contended)]
        assert (event.holder, event.held_by) == ("m-1", text)
        assert f"order:1 is held by {text}" in caplog.text

    def test_the_query_of_the_production_page_names_holders(self, shop: GuardedShop) -> None:
        """An operator joins the tables by the first characters of an owner."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        page = (Path(__file__).parents[3] / "docs/how-to/production.md").read_text()
        query = page[page.index("SELECT k.key") :].partition(";")[0]
        with shop.engine.connect() as db:
            [row] = db.exec_driver_sql(query).all()
        assert tuple(row) == ("order:1", OTHER.name, OTHER.host, str(HOLDER))

    def test_only_the_first_refusal_reads_the_name(
        self, shop: GuardedShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Later refusals cost no statement, neither in this process nor in its children. A missing
        name is not read again at once, either."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        read: list[str] = []
        ask = shop.ledger.worker

        def asking(number: str) -> Worker | None:
            read.append(number)
            return ask(number)

        monkeypatch.setattr(shop.ledger, "worker", asking)
        for _ in range(3):
            assert "held by celery@web-3, pid 4711" in str(refusal(shop.tg))
        claims.end_leases(shop.engine)
        hold(shop, Owner(f"0000000f{1:06x}0123456789", "m-2"))
        for _ in range(3):
            refusal(shop.tg)
        assert read == [OTHER.number, "0000000f"]
        assert "held by worker 0000000f, pid 1, message m-2" in str(refusal(shop.tg))

    def test_children_know_what_their_worker_read(self, pg: GuardedShop) -> None:
        """Each work horse of RQ is a new process. What one of them read, the next one knows."""

        class Once:
            def __init__(self) -> None:
                self.asked: list[str] = []

            def worker(self, number: str) -> Worker:
                self.asked.append(number)
                return OTHER

        for asked in ([OTHER.number], []):
            pid = os.fork()
            if pid == 0:
                ledger: Any = Once()
                said = Names(ledger).process(HOLDER)
                os._exit(0 if (said, ledger.asked) == ("celery@web-3, pid 4711", asked) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_a_takeover_names_the_last_holder(
        self, shop: GuardedShop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The holder whose lease ran out is named by its worker, too."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        claims.end_leases(shop.engine)
        shop.deliver(lambda guard: None)
        [event] = [each for each in shop.events if isinstance(each, Takeover)]
        assert event.held_by == "celery@web-3, pid 4711, message m-1"
        assert "the lease of celery@web-3, pid 4711, message m-1 ran out" in caplog.text

    def test_the_error_of_dead_work_names_the_last_holder(self, shop: GuardedShop) -> None:
        """The record has the number and pid, so the name is read when the error is raised."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        claims.end_leases(shop.engine)
        shop.ledger.claim(claims.request(max_crashes=1))
        with pytest.raises(WorkDeadError) as caught:
            shop.deliver(lambda guard: None)
        assert "(the last: celery@web-3, pid 4711, message m-1 vanished)" in str(caught.value)

    def test_a_program_is_named_by_its_file_and_host(self, shop: GuardedShop, url: str) -> None:
        """A process that has died is named, with its pid."""
        pid = run_script(HOLDS, url)
        text = str(refusal(shop.tg))
        assert f"order:1 is held by python on {node()}, pid {pid}, for at most" in text

    def test_this_worker_is_named_without_a_statement(self, shop: GuardedShop) -> None:
        """A key may be held by another thread or child of the same worker."""
        workers.describe_worker("celery", "celery@web-9")
        with shop.tg.lock("order:1"):
            seen = contextvars.Context().run(refusal, shop.tg)
        assert f"celery@web-9 on {node()}, pid {os.getpid()}" in str(seen)

    def test_with_locks_only_the_value_says_number_and_pid(self) -> None:
        """There is no ledger to read names from."""
        tg = taskguard.connect(locks=MemoryLocks(), ledger=None)
        with tg.lock("order:1"):
            busy = contextvars.Context().run(refusal, tg)
        assert f"held by worker {names.nonces.number}, pid {os.getpid()}" in str(busy)
        assert Owner.parse(busy.owner or "").named == (names.nonces.number, os.getpid())

    def test_a_ledger_that_is_away_hides_no_refusal(self) -> None:
        """A holder is named by number and pid then, and the ledger is not asked again at once."""

        class Away:
            asked = 0

            def worker(self, number: str) -> Worker:
                self.asked += 1
                raise LedgerUnavailableError(f"no answer about {number}")

        ledger: Any = Away()
        known = Names(ledger)
        assert known.process(HOLDER) == known.process(HOLDER) == "worker 1f2e3d4c, pid 4711"
        assert ledger.asked == 1
        assert known.described(Owner("another program's", "")) == "an unknown holder"


class TestCommands:
    """`taskguard` names workers."""

    def test_work_show_names_the_holder(
        self, shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """So do the errors of DEAD work, in the list and in the record."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        assert main(["work", "show", "ship order:1", "--url", url]) == 0
        text = f"  at     celery@web-3, pid 4711; owner {HOLDER}, fence "
        assert text in capsys.readouterr().out
        claims.end_leases(shop.engine)
        shop.ledger.claim(claims.request(max_crashes=1))
        why = "celery@web-3, pid 4711, message m-1 vanished\n"
        assert main(["work", "list", "--url", url]) == 0
        assert capsys.readouterr().out.endswith(f"ship order:1\t{why}")
        assert main(["work", "show", "ship order:1", "--url", url]) == 0
        assert f"  error  {why}" in capsys.readouterr().out

    def test_waiting_names_the_holder_of_each_key(
        self, shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Once, and only while the key is held."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        for number in (2, 3):
            parked = claims.request(number, keys=("order:1",), call="{}")
            assert shop.ledger.park(parked)
        assert shop.ledger.park(claims.request(4, call="{}"))
        assert main(["waiting", "--url", url]) == 0
        first, second, other = capsys.readouterr().out.splitlines()
        assert first.endswith("\t1\tship order:2\tm\twaiting\tcelery@web-3, pid 4711")
        assert second.endswith("\t2\tship order:3\tm\twaiting\t-")
        assert other.endswith("\t1\tship order:4\tm\twaiting\t-")
        claims.end_leases(shop.engine)
        assert main(["waiting", "--url", url]) == 0
        assert "celery@web-3" not in capsys.readouterr().out

    def test_a_released_key_is_released_from_its_worker(
        self,
        shop: GuardedShop,
        url: str,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The command and its log line name the process."""
        shop.ledger.register_worker(OTHER)
        hold(shop)
        assert main(["keys", "release", "order:1", "--ledger", url, "--reason", "gone"]) == 0
        text = "order:1: released from celery@web-3, pid 4711, message m-1"
        assert f"{text}\n" in capsys.readouterr().out
        assert f"{text}: gone" in caplog.text


class TestSharedMemory:
    """The texts that forks share."""

    def test_a_text_is_kept_until_another_number_needs_its_place(self) -> None:
        """It has the time at which it was stored."""
        shared = names._Shared()
        before_s = time.monotonic()
        shared["00000001"] = "one"
        shared["00000002"] = "two" * 100
        at_s, text = shared["00000001"]
        assert before_s <= at_s <= time.monotonic()
        assert text == "one"
        assert shared["00000002"][1] == ("two" * 100)[: 128 - names._Shared._head.size]
        assert shared["00000003"] == (-float("inf"), "")
        shared["00000401"] = "three"
        assert shared["00000001"] == (-float("inf"), "")

    def test_a_text_that_was_written_by_two_at_once_counts_as_missing(self) -> None:
        """Its checksum is wrong."""
        shared = names._Shared()
        shared["00000001"] = "celery@web-1"
        at = bytes(shared._memory).index(b"web-1")
        shared._memory[at : at + 5] = b"web-2"
        assert shared["00000001"] == (-float("inf"), "")


class TestNumbers:
    """The number of a worker."""

    def test_a_worker_that_was_forked_draws_a_number(self) -> None:
        """`rq worker-pool` forks its workers: they are no parts of one worker."""
        pid = os.fork()
        if pid == 0:
            before = names.nonces.number
            workers.describe_worker("rq", "one")
            os._exit(0 if workers.nonces.number != before and not workers.nonces.is_forked else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        before = names.nonces.number
        assert workers.describe_worker("rq", "one") == before

    def test_an_adopted_process_has_the_number_and_stores_nothing(self, shop: GuardedShop) -> None:
        """A work horse that is no fork gets the number of its worker. A worker that it starts is
        one of its own."""
        workers.adopt_worker(OTHER.number)
        with shop.tg.lock("order:1") as lease:
            assert lease.owner.named == (OTHER.number, os.getpid())
        assert rows(shop) == []
        assert workers.describe_worker("rq", "two") != OTHER.number
        with shop.tg.lock("order:1"):
            pass
        assert [row.name for row in rows(shop)] == ["two"]
