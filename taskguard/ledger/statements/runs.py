"""Claims of runs: find the run of a message, and claim it, in one transaction.

Guarantees: nothing is written for a run unless its message is granted the claim, or is answered
that the run is DEAD. A run with a stored call is granted only to the message of that call.

Read next: `ledger/runs.py` for how the run is found.
"""

from __future__ import annotations

from taskguard.ledger.connections.database import Database
from taskguard.ledger.decisions import CLAIMABLE
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.records import message_of
from taskguard.ledger.runs import Run, run_of
from taskguard.ledger.statements.claims import LockedClaim, Seen, peek_in, settle
from taskguard.model.claims import Answer, Busy, ClaimAnswer, Claimed, ClaimRequest
from taskguard.model.states import Decision

__all__ = ["AWAITS_ANOTHER", "awaits_another", "claim_run", "peek_run"]

AWAITS_ANOTHER = Busy(None, None, same_work=True, started=True)
"""The answer to a message of a run for which the message of another call is stored."""


def claim_run(database: Database, request: ClaimRequest) -> ClaimAnswer:
    """Find the run of the message, and claim it, in one transaction."""
    with database.transaction(lock_timeout_s=database.lock_timeout_s, claim=True) as db:
        if request.row is not None:
            rows.read(db, request.row, lock=True)  # its lock comes before the pointer's
        run = run_of(database, db, request)
        if run.found.waits:
            return run.busy
        found = peek_in(database, db, run.request)
        if awaits_another(run.request, found):
            return AWAITS_ANOTHER
        if found.decision in CLAIMABLE or found.decision is Decision.BURY:
            answer = LockedClaim(database, db, run.request).decide()
        else:
            settle(db, run.request, found)
            answer = found.answer(run.request)
        if isinstance(answer, Claimed) or _is_dead(answer):
            run.settle(database, db)
    return run.named(answer) if isinstance(answer, Answer) else answer


def awaits_another(request: ClaimRequest, found: Seen) -> bool:
    """Return whether a run waits for the message of its stored call, which is not this one.

    A call that was stored by `duplicate="replace"` runs with its own arguments. The ledger sends
    its message until the run ends.
    """
    row = found.row
    if row is None or row.call is None or found.decision not in CLAIMABLE:
        return False
    return message_of(row) != request.message.name and found.decision is not Decision.SAME


def _is_dead(answer: ClaimAnswer) -> bool:
    """Return whether a message is answered that its run is DEAD, and so belongs to it."""
    dead = Decision.DEAD, Decision.BURY
    return isinstance(answer, Answer) and answer.decision in dead


def peek_run(database: Database, request: ClaimRequest) -> tuple[Run, Seen]:
    """Return the run of the message, and what `peek()` returns for it."""
    with database.transaction() as db:
        run = run_of(database, db, request, lock=False)
        return run, peek_in(database, db, run.request)
