"""Gates that may refuse a claim: which ones a request gets, in which order, and what each reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from support.claims import request
from taskguard.ledger.decisions import Records
from taskguard.ledger.statements.gates import View, gates_of
from taskguard.model.bounds import Bounds, rate_of
from taskguard.model.claims import Busy
from taskguard.model.states import Decision

NOW_US = 1_000_000_000
RATE = rate_of("1/m", 1)
SLOTS = Bounds("order:1", 2, RATE, ("order:1#0", "order:1#1"))


@dataclass
class Key:
    """A row of keys."""

    owner: str = ""
    lease_until: int = 0
    fence: int = 1
    slots: int | None = None
    next_start: int | None = None
    key: str = "order:1"


def view(key: Key, *, base: Key | None = None, others: tuple[Key, ...] = (), **values: Any) -> View:
    records = Records((None,), ((0, 0),), NOW_US)
    return View(request(1, **values), Decision.CREATE, records, [key], base, others)


def names(**values: Any) -> list[str]:
    return [type(gate).__name__ for gate in gates_of(request(1, **values), None)]  # type: ignore[arg-type]


def refusals(seen: View) -> list[str]:
    """The gates that refuse it, of those that read no line."""
    gates = gates_of(seen.request, None)  # type: ignore[arg-type]
    return [type(gate).__name__ for gate in gates if gate.refuse(seen) is not None]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ["Holder"]),
        ({"in_line": True}, ["Holder", "Turn"]),
        ({"bounds": Bounds("order:1", 1, RATE)}, ["Slots", "Holder", "RateOfStarts"]),
        ({"bounds": SLOTS, "in_line": True}, ["Slots", "Holder", "Turn", "RateOfStarts"]),
        ({"newest": "latest", "in_line": True}, ["Newest", "Holder", "Turn"]),
        (
            {"newest": "supersede", "in_line": True, "bounds": Bounds("order:1", 1, RATE)},
            ["Newest", "Slots", "Holder", "Turn", "RateOfStarts"],
        ),
    ],
)
def test_a_claim_has_the_gates_of_its_request(values: dict[str, Any], expected: list[str]) -> None:
    """A claim has the gates of its options. The rate comes last, so that a refused start is not
    charged."""
    assert names(**values) == expected


def test_a_key_that_is_free_or_was_held_is_granted() -> None:
    assert refusals(view(Key())) == []
    assert refusals(view(Key("other", NOW_US))) == []


def test_a_holder_is_named() -> None:
    seen = view(Key("other", NOW_US + 5_000_000))
    [gate] = gates_of(seen.request, None)  # type: ignore[arg-type]
    found = gate.refuse(seen)
    assert isinstance(found, Busy)
    assert found.retry_after_s == 5.0


def test_slots_that_are_taken() -> None:
    """A free slot is refused while as many holders as the limit have the key."""
    held = tuple(Key("other", NOW_US + 1, key=f"order:1#{number}") for number in (1, 2))
    seen = view(Key(), base=Key(), others=held, keys=("order:1#0",), bounds=SLOTS)
    assert seen.room == 0
    assert refusals(seen) == ["Slots"]


def test_a_start_too_early_changes_no_more_than_its_own_time() -> None:
    """If the clock was set back, the noted start is at most one interval from now."""
    base = Key(next_start=NOW_US + 3_600_000_000)
    seen = view(Key(), base=base, keys=("order:1#0",), bounds=SLOTS)
    assert refusals(seen) == ["RateOfStarts"]
    assert seen.noted == {"next_start": NOW_US + RATE.interval_us}
