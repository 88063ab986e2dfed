"""Options are checked when a task is decorated, and say what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from taskguard.errors import ConfigurationError
from taskguard.policy import Policy, make_policy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ttl": 5}, r"unknown option 'ttl'\. Did you mean 'ttl_s'"),
        ({"onceper": "key"}, "Did you mean 'once_per'"),
        ({"busy": "drop"}, "'retry', 'wait', 'skip', 'raise'"),
        ({"busy": "wait"}, "wait_s="),
        ({"on_lost": "kill"}, "'fence', 'interrupt'"),
        ({"ttl_s": 0}, "at least 0.05"),
        ({"ttl_s": "30"}, "give a number"),
        ({"ttl_s": True}, "give a number"),
        ({"ttl_s": float("nan")}, "give a number"),
        ({"max_crashes": 0}, "at least 1"),
        ({"ttl_s": 30, "max_hold_s": 10}, "max_hold_s"),
        ({"namespace": "a b"}, "namespace"),
        ({"namespace": "a" * 101}, "100 bytes at most"),
    ],
)
def test_a_wrong_option_is_named_with_its_task(options: dict[str, Any], said: str) -> None:
    """The message holds the task's name, the option and what is allowed."""
    with pytest.raises(ConfigurationError, match=said) as caught:
        make_policy(options, task="shop.ship")
    assert "shop.ship" in str(caught.value)


def test_defaults() -> None:
    """The defaults are the documented ones."""
    policy = Policy()
    assert (policy.busy, policy.ttl_s, policy.max_crashes) == ("retry", 30.0, 3)
    assert (policy.on_lost, policy.atomic, policy.max_hold_s) == ("fence", False, None)
