"""Real workers, whose servers fail at each boundary of parking and calling.

Three messages of one line, of which one asks for a fault at a boundary, once: each has its effect
once, no two are at work at a time, and nobody is left in the line.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from support.crash_rig import CrashRig
from support.exploration import Exploration
from support.faulty_rig import FAULTS, faulty_rig
from support.waiting import wait_until
from taskguard.model.states import State
from taskguard_sandbox.servers import RabbitMQ, Valkey

LATER = "no relay until the test says so"
BROKER = "whose broker is restarted"
RABBIT = "on RabbitMQ"
MARIADB = "with a ledger on MariaDB"
ROLES = ("first", "second", "third")
PARKING = [
    *("ledger.park asked", "ledger.park done", "ledger.call_next asked", "ledger.call_next done"),
    *("locks.leave_hint asked", "locks.leave_hint done"),
    *("locks.release_and_take_hint asked", "locks.release_and_take_hint done"),
    *("parking.call asked", "parking.call done", "parking.send asked", "parking.send done"),
]


@pytest.fixture
def rig(
    request: pytest.FixtureRequest,
    valkey: Any,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CrashRig]:
    del redis_url  # empties the server
    queue, task, *more = request.param
    database = request.getfixturevalue("mariadb_url" if MARIADB in more else "pg_url")
    if RABBIT in more and not request.getfixturevalue("exploration").whole:
        pytest.skip("RabbitMQ takes half a minute for each restart; `make explore` does it")
    variables = {"CRASH_RELAY": "later"} if LATER in more else {}
    if BROKER in more:
        # What a worker has in hand when Redis dies comes again by that alone.
        variables["CRASH_VISIBILITY_S"] = "10"
    with RabbitMQ() if RABBIT in more else Valkey(appendonly="yes", appendfsync="always") as broker:
        made = faulty_rig(queue, broker, valkey, database, tmp_path, monkeypatch, **variables)
        with made as (rig, injector):
            rig.task = f"support.crashing.{task}"
            yield rig
            assert injector.failed == []
            print(f"faults: {dict(injector.counts)}")


def send(rig: CrashRig, line: str, **faults: str) -> list[str]:
    items = [f"{line}-{role}" for role in ROLES]
    for role, item in zip(ROLES, items, strict=True):
        rig.send_in_line(item, line, faults.get(role))
    return items


Case: TypeAlias = tuple[str, ...]
"""A fault, or none for a kill; whose message asks for it; at which boundary; which try it is."""


def line_of(case: Case) -> str:
    return re.sub(r"\W", "-", " ".join(case))


def send_each(rig: CrashRig, cases: Iterable[Case]) -> list[str]:
    """A line of each case."""
    items: list[str] = []
    for case in cases:
        fault, role, at, *_ = case
        items += send(rig, line_of(case), **{role: f"{fault}: {at}" if fault else at})
    return items


def struck_of(rig: CrashRig, cases: Iterable[Case]) -> list[Case]:
    """Those that happened."""
    return [case for case in cases if rig.struck(f"{line_of(case)}-{case[1]}")]


_COMES_BY_S = 240.0


def restarts(rig: CrashRig, role: str, at: str) -> Iterator[Case]:
    """Until the broker was restarted at this boundary, a line after the other is tried.

    Which message of a line comes first is up to the machine, and so is what the others come by.
    A line's messages are answered before the next one is asked for.
    """
    before, until_s = rig.faults["broker"], time.monotonic() + _COMES_BY_S
    for number in itertools.count(1):
        case = ("broker", role, at, str(number))
        yield case
        if struck_of(rig, [case]):
            # Who asks for it may have nothing to do after that.
            wait_until(lambda: rig.faults["broker"] > before)
            return
        if time.monotonic() > until_s:
            pytest.fail(f"none of {number} lines came by {at!r} of its {role}")


def each_restart(rig: CrashRig, points: Iterable[tuple[str, str]]) -> Iterator[Case]:
    """The same at one of these boundaries after the other."""
    return itertools.chain.from_iterable(restarts(rig, *point) for point in points)


def let_restart(rig: CrashRig, case: Case) -> None:
    """From here on: the whole line was sent."""
    (rig.folder / f"sent {line_of(case)}").touch()


def is_of_parking(at: str) -> bool:
    """Whether who is parked comes by it, and not who calls."""
    return at.partition(" ")[0] in ("ledger.park", "locks.leave_hint", "parking.call")


def role_for(at: str, seen: dict[str, Any]) -> str:
    """Who comes by it in any order of the three: mostly the second one is parked, not the first."""
    roles = ("second", "third", "first") if is_of_parking(at) else ROLES
    return next(role for role in roles if at in seen[role])


def expect(rig: CrashRig, lines: list[str], items: list[str]) -> None:
    """What holds of each line once its work has ended."""
    wait_until(lambda: rig.ledger.waiting() == [])
    assert rig.effects() == dict.fromkeys(items, 1)
    assert [line for line in lines if rig.overlapped(line)] == []


def lines_left(rig: CrashRig, items: list[str]) -> set[str]:
    """The keys of lines in which one of these is not done."""
    left = [item for item in items if rig.state(item) is not State.DONE]
    return {f"line:{item.rpartition('-')[0]}" for item in left}


def lines_called(rig: CrashRig) -> set[str]:
    """The keys of lines of which somebody was called, and has not come."""
    return {each.key for each in rig.ledger.waiting() if each.expected_until_s is not None}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [("celery", "in_line"), ("rq", "in_line_by_rq"), ("celery", "in_line", MARIADB)],
    indirect=True,
    ids=["celery", "rq", "mariadb"],
)
def test_faults_at_any_boundary_of_a_line(rig: CrashRig, exploration: Exploration) -> None:
    """First undisturbed, for the boundaries that they come by; then each fault at each of them."""
    with rig.worker(), rig.worker():
        items = send(rig, "calm")
        rig.wait_until_done(items)
        wait_until(lambda: all("body done" in rig.seen(item) for item in items))
        seen = {
            role: dict.fromkeys(rig.seen(item)) for role, item in zip(ROLES, items, strict=True)
        }
        if exploration.whole and rig.queue == "celery":
            points = [(role, at) for role in ROLES for at in seen[role]]
        else:
            points = [(role_for(at, seen), at) for at in PARKING]
        cases = [(fault, *point) for fault in FAULTS for point in points]
        if rig.queue == "rq" or rig.engine.name == "mariadb":
            cases = exploration.pick(cases, at_most=12)
        items += send_each(rig, cases)
        rig.wait_until_done(items)
        expect(rig, ["calm", *map(line_of, cases)], items)
    struck = struck_of(rig, cases)
    # Who comes first decides who is parked, and a machine that is busy decides who comes first.
    assert len(struck) >= 0.5 * len(cases), sorted({*cases} - {*struck})
    print(f"{len(cases)} boundaries and faults, {len(struck)} happened, one effect each")


# What a message comes by that fails, and keeps its place until Celery has said what becomes of it.
FIRST = ("ledger.claim asked", "body asked", "ledger.fail asked", "ledger.fail done")
FIRST += ("parking.failed done", "ledger.keep asked", "ledger.keep done", "transaction.commit done")
SECOND = ("ledger.leave asked", "ledger.leave done", "ledger.call_next asked")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [
        ("celery", "strictly", LATER),
        ("rq", "strictly_by_rq", LATER),
        ("celery", "strictly", LATER, MARIADB),
    ],
    indirect=True,
    ids=["celery", "rq", "mariadb"],
)
def test_faults_while_it_keeps_its_place(rig: CrashRig, exploration: Exploration) -> None:
    """The first one is retried, the second one has no retries left: nobody goes before them.

    Without a relay who is left was called, as above.
    """
    points = [("first", at) for at in FIRST] + [("second", at) for at in SECOND]
    cases = [(fault, *point) for fault in FAULTS for point in points]
    by_default = rig.queue == "celery" and rig.engine.name == "postgresql"
    cases = exploration.pick(cases, at_most=24 if by_default else 8)
    with rig.worker(), rig.worker():
        for case in cases:
            enqueue_strictly(rig, case)
        ended = [f"{line_of(case)}-{role}" for case in cases for role in ROLES[::2]]
        rig.wait_until_quiet()
        assert lines_left(rig, ended) == lines_called(rig)
        rig.allow_relay()
        rig.wait_until_done(ended)
        expect(rig, [*map(line_of, cases)], ended)
    expect_in_order(rig, cases)
    struck = struck_of(rig, cases)
    assert len(struck) == len(cases), sorted({*cases} - {*struck})


def enqueue_strictly(rig: CrashRig, case: Case) -> None:
    """A line of the case; each has its place from its enqueueing on: no neighbour is faster."""
    fault, role, at, *_ = case
    for each in ROLES:
        item = f"{line_of(case)}-{each}"
        args = (item, line_of(case), f"{fault}: {at}" if each == role else None)
        rig.enqueue(item, args)


def expect_in_order(rig: CrashRig, cases: Iterable[Case]) -> None:
    """No message of a line began before the one before it had ended for good."""
    for case in cases:
        began = [each for each, _ in itertools.groupby(rig.began(line_of(case)))]
        assert began == [f"{line_of(case)}-{role}" for role in ROLES]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [("celery", "in_line", LATER), ("rq", "in_line_by_rq", LATER)],
    indirect=True,
    ids=["celery", "rq"],
)
def test_what_waits_for_a_relay(rig: CrashRig, exploration: Exploration) -> None:
    """While there is none, a line goes on by itself, unless the next one was called and nobody sent
    it: who called was killed, or got no answer. A relay ends that, too."""
    points = [("second" if is_of_parking(at) else "first", at) for at in PARKING]
    cases = [(fault, *point) for fault in ("", "forget", *FAULTS[1:]) for point in points]
    cases = exploration.pick(cases, at_most=36 if rig.queue == "celery" else 12)
    with rig.worker(), rig.worker():
        items = send_each(rig, cases)
        rig.wait_until_quiet()
        called = lines_called(rig)
        assert lines_left(rig, items) == called
        rig.allow_relay()
        rig.wait_until_done(items)
        expect(rig, [*map(line_of, cases)], items)
    print(f"{len(cases)} boundaries and faults, {sorted(called)} waited for a relay")


# Beside the boundaries of a line: what takes an older one's place, and tells its caller.
NEWEST = [
    *("ledger.claim asked", "ledger.claim done", "locks.hand_over asked", "locks.hand_over done"),
    *("ledger.park_newest asked", "ledger.park_newest done", "ledger.told asked"),
    *("ledger.told done", "parking.send asked", "parking.send done", "locks.leave_hint asked"),
    *("transaction.statement done", "transaction.commit asked", "transaction.commit done"),
    *("ledger.call_next asked", "ledger.call_next done", "delivery done"),
]
# Those of them that come first, and those who are parked, come by.
NEWEST_COME_BY = [
    *(("first", f"{at} done") for at in ("ledger.claim", "transaction.commit", "ledger.call_next")),
    *(("second", at) for at in ("ledger.park_newest asked", "ledger.park_newest done")),
]
# Killed there, a process leaves a lock that no record tells of: the claim may have been refused.
DIES_WITH_THE_LOCK = ("ledger.claim asked", "ledger.claim done")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [
        ("celery", "latest", LATER),
        ("celery", "supersede"),
        ("rq", "latest_by_rq", LATER),
        ("rq", "supersede_by_rq"),
    ],
    indirect=True,
    ids=["latest", "supersede", "rq-latest", "rq-supersede"],
)
def test_killed_or_with_faults_the_newest_wins(rig: CrashRig, exploration: Exploration) -> None:
    """The newest has its effect, once; each is answered, and those that are REVOKED have none.

    While there is no relay, who is not answered was called, or is to be told that he never runs;
    or nobody looks for his key, for a dead process has it at the lock server alone.
    """
    points = [(role, at) for role in ROLES for at in NEWEST]
    cases = [(fault, *point) for fault in ("", *FAULTS) for point in points]
    cases = exploration.pick(cases, at_most=36 if rig.queue == "celery" else 10)
    with rig.worker(), rig.worker():
        items = send_each(rig, cases)
        rig.wait_until_quiet()
        overdue = {message.partition("@")[0] for message in rig.messages_due()}
        died = [line_of(case) for case in cases if not case[0] and case[2] in DIES_WITH_THE_LOCK]
        beside_dead = {f"{line}-{role}" for line in died for role in ROLES}
        assert set(rig.unanswered(items)) <= overdue | beside_dead
        rig.allow_relay()
        states = rig.wait_until_answered(items)
        wait_until(lambda: rig.ledger.waiting() == [])
    assert set(states.values()) <= {"SUCCESS", "REVOKED"}
    assert {states[f"{line_of(case)}-third"] for case in cases} == {"SUCCESS"}
    assert rig.effects() == {item: 1 for item in items if states[item] == "SUCCESS"}
    struck = struck_of(rig, cases)
    assert len(struck) >= 0.4 * len(cases), sorted({*cases} - {*struck})
    print(f"{len(cases)} boundaries and faults, {len(struck)} happened, one effect each")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [
        ("celery", "in_line", BROKER),
        pytest.param(("celery", "in_line", RABBIT), marks=pytest.mark.debian),
        ("rq", "in_line_by_rq"),
    ],
    indirect=True,
    ids=["celery-redis", "celery-rabbitmq", "rq"],
)
def test_the_broker_is_restarted(rig: CrashRig, exploration: Exploration) -> None:
    """At a boundary of one line after the other, with what it has acknowledged."""
    points = [("second" if is_of_parking(at) else "first", at) for at in PARKING]
    lines: list[str] = []
    items: list[str] = []
    for point in exploration.pick(points, at_most=2):
        # A worker of RQ's that does not get over the restart is not there for the next one.
        with rig.worker(), rig.worker():
            for case in restarts(rig, *point):
                lines.append(line_of(case))
                items += send_each(rig, [case])
                let_restart(rig, case)
                rig.wait_until_done(items)
    expect(rig, lines, items)
    print(f"{len(lines)} lines, {rig.faults['broker']} restarts")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [
        ("celery", "strictly", BROKER),
        pytest.param(("celery", "strictly", RABBIT), marks=pytest.mark.debian),
    ],
    indirect=True,
    ids=["celery-redis", "celery-rabbitmq"],
)
def test_the_broker_is_restarted_beside_a_strict_line(
    rig: CrashRig, exploration: Exploration
) -> None:
    """While the first one is retried, or the second one fails for good: nobody goes before them."""
    points = [("first", at) for at in FIRST] + [("second", at) for at in SECOND]
    cases: list[Case] = []
    ended: list[str] = []
    with rig.worker(), rig.worker():
        for case in each_restart(rig, exploration.pick(points, at_most=1)):
            cases.append(case)
            enqueue_strictly(rig, case)
            let_restart(rig, case)
            ended += [f"{line_of(case)}-{role}" for role in ROLES[::2]]
            rig.wait_until_done(ended)
        expect(rig, [*map(line_of, cases)], ended)
    expect_in_order(rig, cases)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [
        ("celery", "latest", BROKER),
        pytest.param(("celery", "latest", RABBIT), marks=pytest.mark.debian),
    ],
    indirect=True,
    ids=["celery-redis", "celery-rabbitmq"],
)
def test_the_broker_is_restarted_and_the_newest_wins(
    rig: CrashRig, exploration: Exploration
) -> None:
    """The newest has its effect, once; each is answered."""
    items: list[str] = []
    with rig.worker(), rig.worker():
        for case in each_restart(rig, exploration.pick(NEWEST_COME_BY, at_most=1)):
            items += send_each(rig, [case])
            let_restart(rig, case)
            states = rig.wait_until_answered(items)
            assert states[items[-1]] == "SUCCESS"
        wait_until(lambda: rig.ledger.waiting() == [])
    assert set(states.values()) <= {"SUCCESS", "REVOKED"}
    assert rig.effects() == {item: 1 for item in items if states[item] == "SUCCESS"}
    print(f"{len(items) // len(ROLES)} lines, {rig.faults['broker']} restarts")
