"""`purge` forgets old ended work in batches while workers run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from support.databases import DATABASES
from taskguard.cli import main
from taskguard.errors import ConfigurationError, StaleTokenError
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.statements import claims as steps
from taskguard.ledger.tables import ACTIONS, COUNTS, HAPPENINGS, KEYS, MESSAGES, WORK
from taskguard.model.claims import Answer, Claimed, ClaimRequest, MessageRef
from taskguard.model.counts import Count, Noted
from taskguard.model.history import Happened
from taskguard.model.lease import new_owner
from taskguard.model.records import Purged

DAY_S = 86_400.0


class Store:
    """A ledger, and a way to make rows older."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ledger = SqlLedger(url)
        self.ledger.create_schema()
        self.engine = sa.create_engine(url)

    def claim(self, name: str, *, message: str = "") -> Claimed:
        """A work of its own name and key."""
        found = self.ledger.claim(self.request(name, message=message))
        assert isinstance(found, Claimed)
        return found

    def request(self, name: str, *, message: str = "") -> ClaimRequest:
        return ClaimRequest(
            keys=(f"order:{name}",),
            owner=new_owner(message or name),
            ttl_s=30.0,
            work=f"ship order:{name}",
            task="ship",
            message=MessageRef(message or name),
        )

    def age(self, days: float) -> None:
        """Let this much time pass, except for leases."""
        us = int(days * DAY_S * 1e6)
        with self.engine.begin() as db:
            db.execute(sa.update(WORK).values(finished=WORK.c.finished - us))
            db.execute(sa.update(WORK).values(fence=WORK.c.fence - us))
            db.execute(sa.update(KEYS).values(fence=KEYS.c.fence - us))
            db.execute(sa.update(MESSAGES).values(updated=MESSAGES.c.updated - us))

    def left(self) -> list[set[str]]:
        """The work, messages and keys that there are, by their names."""
        with self.engine.connect() as db:
            return [
                {text.rpartition(":")[2] for text in db.execute(sa.select(column)).scalars()}
                for column in (WORK.c.id, MESSAGES.c.message, KEYS.c.key)
            ]

    def close(self) -> None:
        self.ledger.close()
        self.engine.dispose()


@pytest.fixture(params=DATABASES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made = Store(request.getfixturevalue(request.param))
    yield made
    made.close()


def test_only_what_ended_before_goes(store: Store) -> None:
    """Old DONE and FAILED work is forgotten, but not young, NEW, PROCESSING or DEAD work."""
    ledger = store.ledger
    for name in ("done", "failed", "given-back", "running", "dead"):
        claimed = store.claim(name)
        if name == "done":
            ledger.complete_alone(claimed.claim, '"kept until now"')
        elif name == "failed":
            ledger.fail(claimed.claim, "boom")
        elif name == "given-back":
            ledger.give_back(claimed.claim)
        ledger.defer(store.request(name), lambda _: None)
    with store.engine.begin() as db:
        dead = sa.update(WORK).where(WORK.c.id == "ship order:dead")
        db.execute(dead.values(state="DEAD", finished=WORK.c.started))
        free = {"owner": "", "lease_until": 0}
        db.execute(sa.update(KEYS).where(KEYS.c.key == "order:dead").values(**free))
    store.age(31)
    ledger.complete_alone(store.claim("young").claim, None)
    assert ledger.purge(older_than_s=30 * DAY_S) == Purged(work_items=2, messages=2, keys=4)
    work_ids, messages, keys = store.left()
    assert work_ids == {"given-back", "running", "dead", "young"}
    assert messages == {"given-back", "running", "dead"}
    assert keys == {"running", "young"}
    assert ledger.purge(older_than_s=30 * DAY_S, dead=True) == Purged(1, 1, 0)
    assert store.left()[0] == {"given-back", "running", "young"}


def test_keys_of_holders_that_crashed_go_by_their_lease(store: Store) -> None:
    """Keys of crashed holders are forgotten after their lease. Valid leases and the database's mark
    stay."""
    ledger = store.ledger
    crashed, asleep = store.claim("crashed"), store.claim("asleep")
    store.claim("long-lease")
    lock = ledger.claim(replace(store.request("lock"), work=None))
    assert isinstance(lock, Claimed)
    with store.engine.begin() as db:
        ledger.enqueue(db, replace(store.request("enqueued"), call="{}"))
    before = {"crashed", "asleep", "long-lease", "lock"}
    mark = store.left()[2] - before
    store.age(31)
    assert ledger.purge(older_than_s=30 * DAY_S).keys == 0
    us = int(31 * DAY_S * 1e6)
    with store.engine.begin() as db:
        run_out = KEYS.c.key.in_([f"order:{name}" for name in before - {"long-lease"}])
        older = {"lease_until": KEYS.c.lease_until - us}
        db.execute(sa.update(KEYS).where(run_out).values(older))
        db.execute(sa.update(WORK).where(WORK.c.lease_until > 0).values(lease_until=1))
    assert ledger.purge(older_than_s=30 * DAY_S).keys == 3
    assert store.left()[2] == {"long-lease"} | mark
    # The next fence is above all that were granted, and the former holder is refused.
    again = store.claim("crashed", message="again")
    assert again.takeover
    assert again.claim.fence > crashed.claim.fence
    with pytest.raises(StaleTokenError):
        ledger.complete_alone(asleep.claim, None)
    assert not ledger.give_back(lock.claim)
    assert isinstance(ledger.claim(replace(store.request("lock"), work=None)), Claimed)
    if mark:
        with store.engine.begin() as db:
            ledger.enqueue(db, replace(store.request("enqueued-too"), call="{}"))
        assert store.left()[2] >= mark


def test_a_holder_goes_on_and_a_forgotten_key_gets_a_higher_token(store: Store) -> None:
    """A purge during work takes nothing from it, and a forgotten key gets a higher token."""
    first = store.claim("a")
    store.ledger.complete_alone(first.claim, None)
    running = store.claim("b")
    store.age(31)
    with store.engine.begin() as db:  # the holder's own token must not change
        db.execute(sa.update(KEYS).where(KEYS.c.owner != "").values(fence=running.claim.fence))
        b = sa.update(WORK).where(WORK.c.id == "ship order:b")
        db.execute(b.values(fence=running.claim.fence))
    store.ledger.purge(older_than_s=30 * DAY_S)
    store.ledger.complete_alone(running.claim, None)
    again = store.claim("a", message="another")
    assert again.claim.fence > first.claim.fence


def test_numbers_of_one_message_go_with_the_works_that_they_are_of(store: Store) -> None:
    """Numbers of one message id are purged with each of its work items, even if those are more than
    a batch."""
    for number in range(7):
        claimed = store.claim(f"{number}", message="nightly")
        assert store.ledger.defer(store.request(f"{number}", message="nightly"), lambda _: None)
        if number != 3:
            store.ledger.complete_alone(claimed.claim, None)
    store.age(31)
    assert store.ledger.purge(older_than_s=30 * DAY_S, batch=2).messages == 6
    with store.engine.connect() as db:
        assert db.execute(sa.select(MESSAGES.c.work)).scalars().all() == ["ship order:3"]


def test_the_history_of_keys_and_old_minutes_go(store: Store) -> None:
    """Happenings go after a week, actions as work does, and minutes after two days. Totals stay."""
    ledger = store.ledger
    noted = Noted(key="order:a", task="ship", what=Happened.DUPLICATE)
    ledger.note_happenings([noted])
    assert ledger.requeue("none", reason="there is none") is False
    ledger.add_counts([Count("ship", "done", 1.0)])
    with store.engine.begin() as db:
        db.execute(sa.insert(ACTIONS).values(at=1, action="drop", actor="ann", reason="old"))
        [now_us] = db.execute(sa.select(HAPPENINGS.c.at)).scalars()
        for days in (6, 8):
            at_us = now_us - int(days * DAY_S * 1e6)
            old = {"at": at_us, "key": "b", "task": "", "what": "skipped", "owner": "", "n": 1}
            db.execute(sa.insert(HAPPENINGS).values(**old))
            db.execute(
                sa.insert(ACTIONS).values(at=at_us, action="drop", actor="ann", reason="young")
            )
            minute = at_us // 60_000_000
            db.execute(sa.insert(COUNTS).values(bucket=minute, task="ship", what="done", n=1.0))
    gone = ledger.purge(older_than_s=30 * DAY_S, batch=1)
    assert gone == Purged(0, 0, 0, happenings=1, actions=1, counts=2)
    gone = ledger.purge(older_than_s=30 * DAY_S, history_s=5 * DAY_S)
    assert gone == Purged(0, 0, 0, happenings=1)
    with store.engine.connect() as db:
        assert db.execute(sa.select(HAPPENINGS.c.what)).scalars().all() == ["duplicate"]
        assert db.execute(sa.select(COUNTS.c.n)).scalars().all() == [1.0, 1.0]


def test_more_than_a_batch_goes(store: Store) -> None:
    """More work than a batch is purged in several transactions."""
    for number in range(7):
        store.ledger.complete_alone(store.claim(f"{number}").claim, None)
    store.age(31)
    assert store.ledger.purge(older_than_s=30 * DAY_S, batch=3) == Purged(7, 0, 7)
    assert store.left() == [set(), set(), set()]


def test_locked_rows_are_left_for_the_next_time(pg_url: str) -> None:
    """On PostgreSQL, a purge leaves locked rows for the next one."""
    store = Store(pg_url)
    for name in ("a", "b"):
        store.ledger.complete_alone(store.claim(name).claim, None)
    store.age(31)
    with store.engine.begin() as db:
        db.execute(sa.select(WORK).where(WORK.c.id == "ship order:a").with_for_update())
        assert store.ledger.purge(older_than_s=30 * DAY_S).work_items == 1
    assert store.ledger.purge(older_than_s=30 * DAY_S).work_items == 1
    store.close()


def test_a_younger_result_is_still_answered(store: Store) -> None:
    """The age of work counts from its end, and younger work still has its result."""
    store.ledger.complete_alone(store.claim("a").claim, '"result"')
    store.age(29)
    store.ledger.purge(older_than_s=30 * DAY_S)
    found = store.ledger.claim(store.request("a", message="another"))
    assert isinstance(found, Answer)
    assert found.result_json == '"result"'


def test_the_command_says_what_went(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """`taskguard purge` takes an age, and prints what it deleted."""
    store.ledger.complete_alone(store.claim("a").claim, None)
    store.age(2)
    nothing = "0 happenings, 0 actions, 0 counts\n"
    assert main(["purge", "--url", store.url]) == 0
    deleted = "deleted: 0 work items, 0 messages, 0 keys, 0 workers, "
    assert capsys.readouterr().out == deleted + nothing
    assert main(["purge", "--url", store.url, "--older-than", "36h", "--batch", "10"]) == 0
    deleted = "deleted: 1 work items, 0 messages, 1 keys, 0 workers, "
    assert capsys.readouterr().out == deleted + nothing


@pytest.mark.parametrize("age", ["30", "d", "1.5h", "1w", ""])
def test_an_age_that_cannot_be_read_is_refused(
    age: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An age without a unit is refused before the database is used."""
    with pytest.raises(SystemExit):
        main(["purge", "--url", "sqlite://", "--older-than", age])
    assert "is not an age like 90s" in capsys.readouterr().err


def test_without_tables_the_command_says_so(
    sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without tables, `taskguard purge` names the command that creates them."""
    assert main(["purge", "--url", sqlite_url]) == 1
    assert "taskguard ledger create" in capsys.readouterr().err


@pytest.mark.parametrize("work", ["ship a and b", None])
@pytest.mark.parametrize("gone", ["a", "ab"])
def test_a_purge_between_the_steps_of_a_claim_takes_no_key_from_it(
    pg_url: str, monkeypatch: pytest.MonkeyPatch, gone: str, work: str | None
) -> None:
    """A claim of several keys first inserts their rows and then locks them. A purge in between
    takes none."""
    store = Store(pg_url)
    for name in gone:
        store.ledger.complete_alone(store.claim(name).claim, None)
    store.age(31)
    make, purged = steps.LockedClaim._make_keys, []

    def make_keys(self: Any) -> None:
        make(self)
        if not purged:
            purged.append(store.ledger.purge(older_than_s=30 * DAY_S))

    monkeypatch.setattr(steps.LockedClaim, "_make_keys", make_keys)
    both = replace(store.request("both"), keys=("order:a", "order:b"), work=work)
    assert isinstance(store.ledger.claim(both), Claimed)
    assert purged[0].keys == len(gone)
    for name in "ab":
        other = replace(store.request(name, message="another"), work=None)
        assert not isinstance(store.ledger.claim(other), Claimed)
    store.close()


def test_an_age_below_an_hour_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """An age below an hour is refused: a clock that is set back by more would give a lower
    token."""
    with pytest.raises(ConfigurationError, match="an hour"):
        store.ledger.purge(older_than_s=0)
    with pytest.raises(SystemExit, match="2"):
        main(["purge", "--url", store.url, "--older-than", "59m"])
    assert "argument --older-than: '59m' is less than an hour" in capsys.readouterr().err
