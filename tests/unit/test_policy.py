"""Options are checked when a task is decorated, and say what to write instead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import pytest

import taskguard
from support.pages import ROOT
from taskguard.cli import _duration_s
from taskguard.errors import ConfigurationError
from taskguard.integration import Sweeper
from taskguard.ledger.sql import SqlLedger
from taskguard.locks.redis import RedisLocks
from taskguard.model.policy import Policy, make_policy
from taskguard.model.states import State


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ttl": 5}, r"unknown option 'ttl'\. Did you mean 'ttl_s'"),
        ({"onceper": "key"}, "Did you mean 'once_per'"),
        ({"busy": "drop"}, "'retry', 'park', 'latest', 'supersede', 'wait', 'skip', 'raise'"),
        ({"busy": "wait"}, "wait_s="),
        ({"on_lost": "kill"}, "'fence', 'interrupt'"),
        ({"order": "fifo"}, "order='fifo': order= is one of 'best_effort', 'strict', 'priority'"),
        ({"ttl_s": 0}, "at least 0.05"),
        ({"ttl_s": "30"}, "give a number"),
        ({"ttl_s": True}, "give a number"),
        ({"ttl_s": float("nan")}, "give a number"),
        ({"ttl_s": float("inf")}, r"ttl_s=inf: give a number of at most 3,153,600,000\."),
        ({"ttl_s": 1e300}, "ttl_s=1e.300: give a number of at most"),
        ({"busy": "wait", "wait_s": float("inf")}, "wait_s=inf"),
        ({"busy": "wait", "wait_s": float("nan")}, "wait_s=nan"),
        ({"wait_s": -1}, "at least 0"),
        ({"max_hold_s": float("inf")}, "max_hold_s=inf"),
        ({"max_hold_s": float("nan")}, "max_hold_s=nan"),
        ({"retention_s": float("inf")}, "retention_s=inf"),
        ({"retention_s": float("nan")}, "retention_s=nan"),
        ({"max_crashes": float("inf")}, "max_crashes=inf: give a whole number"),
        ({"max_crashes": 2.5}, "a whole number"),
        ({"max_crashes": 2**31}, "at most 2,147,483,647"),
        ({"max_crashes": 0}, "at least 1"),
        ({"ttl_s": 30, "max_hold_s": 10}, "max_hold_s"),
        ({"rate": "1/d", "burst": 32}, "counts starts for 2.6784e.06 s"),
        ({"rate": "1/m", "burst": 62, "retention_s": 60}, "or a longer retention_s"),
        ({"namespace": "a b"}, "namespace"),
        ({"namespace": "a" * 101}, "100 bytes at most"),
    ],
)
def test_a_wrong_option_is_named_with_its_task(options: dict[str, Any], said: str) -> None:
    """The message holds the task's name, the option and what is allowed."""
    with pytest.raises(ConfigurationError, match=said) as caught:
        make_policy(options, task="shop.ship")
    assert "shop.ship" in str(caught.value)


def test_a_burst_that_is_allowed_again_in_time() -> None:
    """Nothing is purged before an hour has passed, or `retention_s`."""
    assert Policy(rate="1/d", burst=31).burst == 31
    assert Policy(rate="1/m", burst=61, retention_s=60).burst == 61


def test_defaults() -> None:
    """The defaults are the documented ones."""
    policy = Policy()
    assert (policy.busy, policy.ttl_s, policy.max_crashes) == ("retry", 30.0, 3)
    assert (policy.on_lost, policy.atomic, policy.max_hold_s) == ("fence", False, None)


NO_NUMBERS = [float("inf"), float("nan"), float("-inf"), -1, "1", True, 1e300]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda value: SqlLedger("sqlite://", lock_timeout_s=value),
        lambda value: SqlLedger("sqlite://", idle_in_transaction_s=value),
        lambda value: SqlLedger("sqlite://", resolve_timeout_s=value),
        lambda value: SqlLedger("sqlite://").purge(older_than_s=value),
        lambda value: SqlLedger("sqlite://").purge(older_than_s=9e5, batch=value),
        lambda value: SqlLedger("sqlite://").list_work(State.DEAD, limit=value),
        lambda value: RedisLocks("redis://localhost", socket_timeout_s=value),
        lambda value: RedisLocks("redis://localhost", connect_timeout_s=value),
        lambda value: RedisLocks("redis://localhost", retries=value),
        lambda value: locks_only().lock("a", ttl_s=value),
        lambda value: locks_only().lock("a", wait_s=value),
        lambda value: locks_only().lock("a", max_hold_s=value),
        lambda value: locks_only().guarded(key="a", ttl_s=value)(test_defaults),
        lambda value: Sweeper(locks_only(), {}, again_after_s=value),
        lambda value: Sweeper(locks_only(), {}, max_sends=value),
        lambda value: Sweeper(locks_only(), {}, batch=value),
    ],
)
def test_every_other_number_is_checked_where_it_is_given(
    make: Callable[[Any], Any], value: Any
) -> None:
    """Not at the first delivery, by an OverflowError of the driver's, or never."""
    with pytest.raises(ConfigurationError):
        make(value)


def locks_only() -> taskguard.TaskGuard:
    return taskguard.connect(locks="memory://", ledger=None)


def test_ages_of_the_command_are_checked() -> None:
    """0 would be no pause, or everything."""
    for text in ("0s", "-1d", "inf", "nan", "1e3s", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            _duration_s(text)
    assert _duration_s("90s") == 90.0


FACTS = ("parks", "newest", "strict", "ranked", "stores_calls", "resends", "interrupts", "bounded")


@pytest.mark.parametrize(
    ("options", "true"),
    [
        ({}, set()),
        ({"busy": "park"}, {"parks", "resends"}),
        ({"busy": "latest"}, {"parks", "newest", "resends"}),
        ({"busy": "supersede"}, {"parks", "newest", "resends"}),
        ({"busy": "skip"}, set()),
        ({"busy": "park", "order": "strict"}, {"parks", "strict", "stores_calls", "resends"}),
        ({"busy": "park", "order": "priority"}, {"parks", "ranked", "resends"}),
        ({"recoverable": True}, {"stores_calls", "resends"}),
        ({"on_lost": "interrupt"}, {"interrupts"}),
        ({"limit": 2}, {"bounded"}),
        ({"rate": "1/s"}, {"bounded"}),
    ],
)
def test_what_other_rooms_ask_of_the_options(options: dict[str, Any], true: set[str]) -> None:
    """Which of the facts each value makes true."""
    policy = make_policy(options, task="ship")
    assert {fact for fact in FACTS if getattr(policy, fact)} == true


def test_values_of_options_are_compared_in_one_room() -> None:
    """Integrations, and rooms other than those of a delivery and of the ledger, ask for facts."""
    deciding = ("taskguard/model/policy.py", "taskguard/run/", "taskguard/ledger/")
    compared = re.compile(r"\.(?:busy|order|on_lost|newest) (?:==|!=|in|not in) ")
    found = [
        f"{name}: {line.strip()}"
        for folder in ("taskguard", "integrations")
        for file in (ROOT / folder).glob("**/*.py")
        if not (name := str(file.relative_to(ROOT))).startswith(deciding)
        for line in file.read_text(encoding="utf-8").splitlines()
        if compared.search(line)
    ]
    assert found == []
