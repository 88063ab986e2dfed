"""Options are checked when a task is decorated, and say what to write instead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import pytest

import taskguard
from support.pages import ROOT
from taskguard.cli.output import duration_s
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
    """A burst may take an hour or `retention_s`, because no purge deletes its row before that."""
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
            duration_s(text)
    assert duration_s("90s") == 90.0


FACTS = (
    "parks",
    "newest",
    "replaces_holder",
    "strict",
    "ranked",
    "stores_calls",
    "resends",
    "interrupts",
    "waits_up_to_s",
    "drops",
    "defers",
    "has_slots",
    "bounded",
)


@pytest.mark.parametrize(
    ("options", "true"),
    [
        ({}, {"defers"}),
        ({"busy": "park"}, {"parks", "resends", "defers"}),
        ({"busy": "latest"}, {"parks", "newest", "resends", "defers"}),
        (
            {"busy": "supersede"},
            {"parks", "newest", "replaces_holder", "resends", "defers"},
        ),
        ({"busy": "wait", "wait_s": 1}, {"waits_up_to_s", "defers"}),
        ({"busy": "retry", "wait_s": 1}, {"defers"}),
        ({"busy": "skip"}, {"drops"}),
        ({"busy": "raise"}, set()),
        (
            {"busy": "park", "order": "strict"},
            {"parks", "strict", "stores_calls", "resends", "defers"},
        ),
        ({"busy": "park", "order": "priority"}, {"parks", "ranked", "resends", "defers"}),
        ({"recoverable": True}, {"stores_calls", "resends", "defers"}),
        ({"on_lost": "interrupt"}, {"interrupts", "defers"}),
        ({"limit": 2}, {"has_slots", "bounded", "defers"}),
        ({"rate": "1/s"}, {"bounded", "defers"}),
    ],
)
def test_facts_of_each_option(options: dict[str, Any], true: set[str]) -> None:
    """Each value of an option makes these facts true, and no others."""
    policy = make_policy(options, task="ship")
    assert {fact for fact in FACTS if getattr(policy, fact)} == true


COMPARED = re.compile(
    r"(?<!for )\b(?:busy|order|on_lost|newest) (?:==|!=|in|not in) [\"'(]"
    r"|\bpolicy\.wait_s\b|\b(?:policy|bounds|delivery|lease)\.limit (?:==|!=|<=?|>=?) "
)
# `api.py` refuses values for plain functions before it makes a policy.
BEFORE_POLICY = ("taskguard/api.py", "taskguard/model/policy.py")


def test_only_policy_compares_values_of_options() -> None:
    """Every other module of the core and of the integrations reads a fact of the policy."""
    found = [
        f"{name}: {line.strip()}"
        for folder in ("taskguard", "integrations")
        for file in (ROOT / folder).glob("**/*.py")
        if (name := str(file.relative_to(ROOT))) not in BEFORE_POLICY
        for line in file.read_text(encoding="utf-8").splitlines()
        if COMPARED.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'if delivery.policy.busy in ("skip", "raise"):',
        "if policy.newest != 'supersede':",
        'interrupt=policy.on_lost == "interrupt",',
        "if bounds is None or bounds.limit == 1:",
        "wait_s = policy.wait_s if waits else 0.0",
    ],
)
def test_a_compared_value_is_found(line: str) -> None:
    """The test above finds each form that the code once had."""
    assert COMPARED.search(line)
