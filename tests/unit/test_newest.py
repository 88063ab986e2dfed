"""Which of two messages is the newer one, and where none can take another one's place."""

from __future__ import annotations

from typing import Any

import pytest

from taskguard import Former
from taskguard.errors import ConfigurationError
from taskguard.integration import GuardedFunction, MessageRef
from taskguard.model.states import is_outdated, sent_at_us


@pytest.mark.parametrize(
    ("others_us", "outdated"),
    [([], False), ([None, None], False), ([4, None], False), ([5], False), ([None, 6], True)],
)
def test_what_is_outdated(others_us: list[int | None], outdated: bool) -> None:
    """A message is outdated if another one was sent later, but not at the same moment."""
    assert is_outdated(5, others_us=others_us) is outdated


@pytest.mark.parametrize(("sent_us", "counts_us"), [(None, 7), (3, 3), (9, 7)])
def test_when_a_message_was_sent(sent_us: int | None, counts_us: int) -> None:
    """When it says, but not after it came."""
    assert sent_at_us(sent_us, created_us=7) == counts_us


def body(user: int) -> None:
    """Does nothing."""


@pytest.mark.parametrize("busy", ["latest", "supersede"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"row": object()}, "Remove row="),
        ({"formerly": Former(key="u:<user>")}, "deploy without formerly="),
    ],
)
def test_what_is_refused(busy: str, options: dict[str, Any], says: str) -> None:
    """The decorator refuses the options, with the reason."""
    given = {"key": "user:<user>", "once_per": "message", **options}
    with pytest.raises(ConfigurationError, match=says):
        GuardedFunction(body, **given, busy=busy)


@pytest.mark.parametrize(
    "options", [{"busy": "latest"}, {"busy": "park"}, {"busy": "park", "order": "strict"}]
)
def test_a_callable_that_makes_several_keys(options: dict[str, Any]) -> None:
    """The delivery fails when the callable has returned several keys."""
    made = GuardedFunction(
        body,
        key=lambda user: [f"a:{user}", f"b:{user}"],
        once_per="message",
        **options,
    )
    with pytest.raises(ConfigurationError, match="is for one key"):
        made.delivery((1,), {}, namespace="", message=MessageRef("m"))
