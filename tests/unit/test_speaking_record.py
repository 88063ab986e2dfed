"""Which of a work's records a claim is decided by, where its guard was changed."""

from __future__ import annotations

import pytest

from taskguard.model.states import State, speaking_record

DONE, FAILED, PROCESSING, NEW = State.DONE, State.FAILED, State.PROCESSING, State.NEW


@pytest.mark.parametrize(
    ("records", "speaks"),
    [
        ([None], None),
        ([None, None], None),
        ([(NEW, 0)], 0),
        ([None, (PROCESSING, 5)], 1),
        # Written by one claim, the work's own record counts: an operator requeues that.
        ([(NEW, 5), (State.DEAD, 5)], 0),
        ([(PROCESSING, 5), (PROCESSING, 5)], 0),
        # Buried or revoked by a worker that knows only the former id.
        ([(PROCESSING, 5), (State.DEAD, 5)], 1),
        ([(PROCESSING, 5), (FAILED, 5)], 1),
        ([(PROCESSING, 6), (State.DEAD, 5)], 0),
        # The record of the last claim was written last.
        ([(PROCESSING, 5), (FAILED, 6)], 1),
        ([(PROCESSING, 7), (FAILED, 6)], 0),
        ([None, (FAILED, 6), (PROCESSING, 8)], 2),
        # Enqueued, and never claimed.
        ([(NEW, 0), (PROCESSING, 6)], 1),
        # Done is done, under whichever id.
        ([(FAILED, 9), (DONE, 6)], 1),
        ([(FAILED, 9), (DONE, 6), (DONE, 7)], 2),
        ([(DONE, 6), (DONE, 6)], 0),
    ],
)
def test_the_newest_record_speaks_unless_one_is_done(
    records: list[tuple[State, int] | None], speaks: int | None
) -> None:
    """Only state and fence decide which record counts."""
    assert speaking_record(records) == speaks
