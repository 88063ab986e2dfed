"""`decide_by_row`: every combination of record and row, as a table."""

from __future__ import annotations

from itertools import product

import pytest

from taskguard.ledger.decisions import CLAIMABLE
from taskguard.model.states import BY_ROW, TRANSITIONS, Decision, RowState, State, decide_by_row

D, P, S = Decision, RowState, State
# Possible results of `decide()` for a record in this state; None: there is no record.
RECORDED: dict[State | None, list[Decision]] = {
    None: [D.CREATE, D.SUPERSEDED],
    S.NEW: [D.CLAIM, D.MISMATCH, D.SUPERSEDED],
    S.PROCESSING: [D.SAME, D.BUSY, D.TAKEOVER, D.BURY, D.MISMATCH, D.SUPERSEDED],
    S.FAILED: [D.CLAIM, D.REVOKED, D.MISMATCH, D.SUPERSEDED],
    S.DONE: [D.DONE, D.MISMATCH],
    S.DEAD: [D.DEAD, D.MISMATCH],
}
CASES = [
    (work, recorded, row_state)
    for (work, decisions) in RECORDED.items()
    for recorded, row_state in product(decisions, RowState)
]


@pytest.mark.parametrize(("work", "recorded", "row_state"), CASES)
def test_the_row_decides(work: State | None, recorded: Decision, row_state: RowState) -> None:
    """Only NEW and what this work itself holds can be claimed; DONE is done."""
    decision = decide_by_row(recorded, work, row_state)
    if decision in CLAIMABLE or decision is D.BURY:
        assert row_state in (P.NEW, P.HELD)
    if decision in CLAIMABLE and work is not None:
        by_row = row_state is P.NEW and (work, S.PROCESSING) in BY_ROW
        assert by_row or (work, S.PROCESSING) in TRANSITIONS
    if row_state is P.DONE and recorded is not D.MISMATCH:
        assert decision is D.DONE
    if row_state is P.HELD:
        assert decision is recorded
    if recorded is D.BUSY and row_state is not P.DONE:
        assert decision is D.BUSY  # a live holder: its rivals wait, whatever the row says
    if decision is D.MISSING:
        assert row_state is P.MISSING
    if decision is D.INELIGIBLE:
        assert row_state is P.OTHER


@pytest.mark.parametrize(
    ("work", "recorded", "row_state", "decision"),
    [
        (None, D.CREATE, P.NEW, D.CREATE),
        (None, D.CREATE, P.OTHER, D.INELIGIBLE),
        (None, D.CREATE, P.MISSING, D.MISSING),
        (None, D.CREATE, P.DONE, D.DONE),
        (S.FAILED, D.CLAIM, P.NEW, D.CLAIM),
        (S.FAILED, D.CLAIM, P.OTHER, D.INELIGIBLE),
        (S.FAILED, D.REVOKED, P.NEW, D.REVOKED),
        (S.FAILED, D.MISMATCH, P.NEW, D.MISMATCH),
        (S.PROCESSING, D.TAKEOVER, P.HELD, D.TAKEOVER),
        (S.PROCESSING, D.TAKEOVER, P.OTHER, D.INELIGIBLE),
        (S.PROCESSING, D.TAKEOVER, P.NEW, D.AGAIN),
        (S.PROCESSING, D.BURY, P.NEW, D.AGAIN),
        (S.PROCESSING, D.MISMATCH, P.NEW, D.MISMATCH),
        (S.PROCESSING, D.BUSY, P.NEW, D.BUSY),
        (S.DONE, D.DONE, P.NEW, D.AGAIN),
        (S.DONE, D.MISMATCH, P.NEW, D.AGAIN),
        (S.DONE, D.DONE, P.OTHER, D.DONE),
        (S.DONE, D.DONE, P.MISSING, D.DONE),
        (S.DONE, D.MISMATCH, P.DONE, D.MISMATCH),
        (S.DEAD, D.DEAD, P.NEW, D.AGAIN),
        (S.DEAD, D.DEAD, P.HELD, D.DEAD),
        (S.DEAD, D.DEAD, P.OTHER, D.INELIGIBLE),
    ],
)
def test_the_table(
    work: State | None, recorded: Decision, row_state: RowState, decision: Decision
) -> None:
    """Each case of the table has its decision."""
    assert decide_by_row(recorded, work, row_state) is decision
