"""Real workers, whose servers fail at each boundary of parking and promoting.

Each line has three messages, of which one asks for a fault at a boundary, once. Each message has
its effect once, no two run at a time, and no message is left in the line.
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
    *(
        "ledger.park asked",
        "ledger.park done",
        "ledger.promote_next asked",
        "ledger.promote_next done",
    ),
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
        # If Redis dies, the visibility timeout alone brings back what a worker had in hand.
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
    """Send a line of messages for each case."""
    items: list[str] = []
    for case in cases:
        fault, role, at, *_ = case
        items += send(rig, line_of(case), **{role: f"{fault}: {at}" if fault else at})
    return items


def struck_of(rig: CrashRig, cases: Iterable[Case]) -> list[Case]:
    """Return the cases whose fault happened."""
    return [case for case in cases if rig.struck(f"{line_of(case)}-{case[1]}")]


_COMES_BY_S = 240.0


def restarts(rig: CrashRig, role: str, at: str) -> Iterator[Case]:
    """Yield a line after the other until the broker was restarted at this boundary.

    The order in which messages of a line arrive depends on the machine, and so do the boundaries
    that they reach. A line's messages are answered before the next fault is requested.
    """
    before, until_s = rig.faults["broker"], time.monotonic() + _COMES_BY_S
    for number in itertools.count(1):
        case = ("broker", role, at, str(number))
        yield case
        if struck_of(rig, [case]):
            # The worker that requested the restart may have nothing to do afterwards.
            wait_until(lambda: rig.faults["broker"] > before)
            return
        if time.monotonic() > until_s:
            pytest.fail(f"none of {number} lines came by {at!r} of its {role}")


def each_restart(rig: CrashRig, points: Iterable[tuple[str, str]]) -> Iterator[Case]:
    """Yield the cases of each of these boundaries in turn."""
    return itertools.chain.from_iterable(restarts(rig, *point) for point in points)


def let_restart(rig: CrashRig, case: Case) -> None:
    """Allow the restart from now on: the whole line was sent."""
    (rig.folder / f"sent {line_of(case)}").touch()


def is_of_parking(at: str) -> bool:
    """Return whether a parked message reaches the boundary, and not a message that promotes."""
    return at.partition(" ")[0] in ("ledger.park", "locks.leave_hint", "parking.call")


def role_for(at: str, seen: dict[str, Any]) -> str:
    """Return the role that reaches it in any order of the three: mostly the second is parked."""
    roles = ("second", "third", "first") if is_of_parking(at) else ROLES
    return next(role for role in roles if at in seen[role])


def expect(rig: CrashRig, lines: list[str], items: list[str]) -> None:
    """Check each line after its work has ended."""
    wait_until(lambda: rig.ledger.waiting() == [])
    assert rig.effects() == dict.fromkeys(items, 1)
    assert [line for line in lines if rig.overlapped(line)] == []


def lines_left(rig: CrashRig, items: list[str]) -> set[str]:
    """Return the keys of lines in which one of these is not done."""
    left = [item for item in items if rig.state(item) is not State.DONE]
    return {f"line:{item.rpartition('-')[0]}" for item in left}


def lines_promoted(rig: CrashRig) -> set[str]:
    """Return the keys of lines of which a promoted message has not arrived."""
    return {each.key for each in rig.ledger.waiting() if each.expected_until_s is not None}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rig",
    [("celery", "in_line"), ("rq", "in_line_by_rq"), ("celery", "in_line", MARIADB)],
    indirect=True,
    ids=["celery", "rq", "mariadb"],
)
def test_faults_at_any_boundary_of_a_line(rig: CrashRig, exploration: Exploration) -> None:
    """First run without a fault, to learn the boundaries. Then apply each fault at each of them."""
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
    # The order of arrival decides which message is parked, and depends on how busy the machine is.
    assert len(struck) >= 0.5 * len(cases), sorted({*cases} - {*struck})
    print(f"{len(cases)} boundaries and faults, {len(struck)} happened, one effect each")


# Boundaries of a message that fails, and keeps its position until Celery has decided about a retry.
FIRST = ("ledger.claim asked", "body asked", "ledger.fail asked", "ledger.fail done")
FIRST += ("parking.failed done", "ledger.keep asked", "ledger.keep done", "transaction.commit done")
SECOND = ("ledger.leave asked", "ledger.leave done", "ledger.promote_next asked")


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
    """The first message is retried, and the second fails for good. No later message begins before
    them. Without a relay, each line that stopped has a promoted message that has not arrived."""
    points = [("first", at) for at in FIRST] + [("second", at) for at in SECOND]
    cases = [(fault, *point) for fault in FAULTS for point in points]
    by_default = rig.queue == "celery" and rig.engine.name == "postgresql"
    cases = exploration.pick(cases, at_most=24 if by_default else 8)
    with rig.worker(), rig.worker():
        for case in cases:
            enqueue_strictly(rig, case)
        ended = [f"{line_of(case)}-{role}" for case in cases for role in ROLES[::2]]
        rig.wait_until_quiet()
        assert lines_left(rig, ended) == lines_promoted(rig)
        rig.allow_relay()
        rig.wait_until_done(ended)
        expect(rig, [*map(line_of, cases)], ended)
    expect_in_order(rig, cases)
    struck = struck_of(rig, cases)
    assert len(struck) == len(cases), sorted({*cases} - {*struck})


def enqueue_strictly(rig: CrashRig, case: Case) -> None:
    """Enqueue a line of the case. Each message has its position from then on, so that none
    overtakes."""
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
    """Without a relay, a line stops only if its promoted message has not arrived, because its
    sender was killed or got no answer. A relay sends it again."""
    points = [("second" if is_of_parking(at) else "first", at) for at in PARKING]
    cases = [(fault, *point) for fault in ("", "forget", *FAULTS[1:]) for point in points]
    cases = exploration.pick(cases, at_most=36 if rig.queue == "celery" else 12)
    with rig.worker(), rig.worker():
        items = send_each(rig, cases)
        rig.wait_until_quiet()
        promoted = lines_promoted(rig)
        assert lines_left(rig, items) == promoted
        rig.allow_relay()
        rig.wait_until_done(items)
        expect(rig, [*map(line_of, cases)], items)
    print(f"{len(cases)} boundaries and faults, {sorted(promoted)} waited for a relay")


# In addition to the boundaries of a line: those of superseding a message and of telling its caller.
NEWEST = [
    *("ledger.claim asked", "ledger.claim done", "locks.hand_over asked", "locks.hand_over done"),
    *("ledger.park_newest asked", "ledger.park_newest done", "ledger.note_notified asked"),
    *(
        "ledger.note_notified done",
        "parking.send asked",
        "parking.send done",
        "locks.leave_hint asked",
    ),
    *("transaction.statement done", "transaction.commit asked", "transaction.commit done"),
    *("ledger.promote_next asked", "ledger.promote_next done", "delivery done"),
]
# Boundaries that the first messages reach, and that parked ones reach.
NEWEST_COME_BY = [
    *(
        ("first", f"{at} done")
        for at in ("ledger.claim", "transaction.commit", "ledger.promote_next")
    ),
    *(("second", at) for at in ("ledger.park_newest asked", "ledger.park_newest done")),
]
# A process killed here leaves a lock without a record, because its claim may have been refused.
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
    """The newest message has its effect once. Each message is answered, and REVOKED ones have no
    effect. Without a relay, an unanswered message is overdue, or its line has a dead process that
    still holds the lock."""
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
    """The broker restarts, with its stored messages, at a boundary of one line after the other.
    Each message has its effect once."""
    points = [("second" if is_of_parking(at) else "first", at) for at in PARKING]
    lines: list[str] = []
    items: list[str] = []
    for point in exploration.pick(points, at_most=2):
        # A worker of RQ's that the restart ended is replaced before the next one.
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
    """The broker restarts while the first message is retried, or the second fails for good. No
    later message goes before them."""
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
    """The newest message has its effect once, and each message is answered."""
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
