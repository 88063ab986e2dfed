"""`Line.tla` has the states, events and transitions of `taskguard/model/line_states.py`.

TLC checks in each step that the model makes only transitions that `Line.tla` lists.
"""

from __future__ import annotations

import itertools
import re

import pytest
from model.check import HERE

from taskguard.model.line_states import TRANSITIONS, Event, LineState

pytestmark = pytest.mark.once

MODEL = (HERE / "Line.tla").read_text(encoding="utf-8")
Transition = tuple[str, str, str]

# Each reason to leave transitions out of the model, with their old states, event and new states.
LEFT_OUT: dict[str, tuple[str, str, str]] = {
    "each message of the model is work of its own, so no other message of the work is enqueued": (
        "kept",
        "enqueue",
        "- kept",
    ),
    "no strict message of the model expires": ("waiting", "expire", "kept"),
    "strict work is kept, so it is never promoted, resent or expired": (
        "promoted resent expired",
        "claim",
        "kept",
    ),
    "work is kept if it is strict, and the model does not change that between deliveries": (
        "kept",
        "claim",
        "-",
    ),
    "no message that may be superseded is strict or expires": (
        "expired kept",
        "supersede",
        "superseded",
    ),
    "a newer message has superseded the others in line before their own delivery finds it": (
        "waiting promoted resent expired kept",
        "supersede",
        "-",
    ),
    "no superseded message of the model is revoked": ("superseded", "end", "-"),
    "each message of the model can be sent, as often as needed": (
        "promoted resent expired kept superseded",
        "abandon",
        "-",
    ),
    "Enqueue.tla models it": ("waiting promoted resent expired kept", "replace", "-"),
    "an operator requeues, and the model has none": ("kept superseded", "requeue", "-"),
    "Operators.tla models a drop, after which the caller is notified": (
        "- waiting promoted resent expired kept",
        "drop",
        "superseded",
    ),
    "the same, where no caller waits": (
        "waiting promoted resent expired kept superseded",
        "drop",
        "-",
    ),
}


def products(olds: str, event: str, news: str) -> set[Transition]:
    return set(itertools.product(olds.split(), [event], news.split()))


def of_code() -> set[Transition]:
    return {
        ("-" if old is None else old.value, event.value, "-" if new is None else new.value)
        for old, event, new in TRANSITIONS
    }


def of_model() -> set[Transition]:
    """The transitions that `Line.tla` lists."""
    listed = MODEL.partition("Transitions == UNION {")[2].partition("}}")[0] + "}"
    found = re.findall(r'\{([^{}]+)\} \\X \{"([a-z ]+)"\} \\X \{"([a-z-]+)"\}', listed)
    assert len(found) == listed.count("\n")
    return {
        transition
        for olds, event, new in found
        for transition in products(re.sub(r'[",]', " ", olds), event, new)
    }


def test_each_transition_of_the_model_is_one_of_the_code() -> None:
    assert of_model() <= of_code()


def test_each_transition_of_the_code_is_modelled_or_left_out_for_a_reason() -> None:
    left_out = [products(olds, event, news) for olds, event, news in LEFT_OUT.values()]
    missing = of_code() - of_model()
    assert sorted(itertools.chain.from_iterable(left_out)) == sorted(missing)


def test_the_model_uses_the_names_of_states_and_events() -> None:
    """Each name that it compares or writes is one of the code, and it uses each listed event."""
    lines = {line.value for line in LineState} | {"-"}
    names = re.findall(r'\.line (?:=|#) "([^"]+)"', MODEL)
    for group in re.findall(r"\.line \\(?:not)?in \{([^}]+)\}", MODEL):
        names += re.findall(r'"([^"]+)"', group)
    assert len(set(names)) > 3
    assert set(names) <= lines
    events = set(re.findall(r'(?:After|changes)\((?:\w+, )?"([a-z ]+)"', MODEL))
    assert events == {event for _, event, _ in of_model()}
    assert events <= {event.value for event in Event}
