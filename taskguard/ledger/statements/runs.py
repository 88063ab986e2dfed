"""Claims of runs: find the run of a message, and claim it, in one transaction.

Guarantees: nothing is written for a run unless its message is granted the claim, or is answered
that the run is DEAD. A run with a stored call is granted only to the message of that call.

Read next: `ledger/runs.py` for how the run is found.
"""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.decisions import CLAIMABLE
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.records import message_of
from taskguard.ledger.runs import Run, run_of, will_be_sent
from taskguard.ledger.statements.claims import LockedClaim, Seen, peek_in, peeked, settle
from taskguard.model.claims import Answer, Busy, ClaimAnswer, Claimed, ClaimRequest
from taskguard.model.states import Decision

__all__ = ["awaits_another", "claim_run", "peek_run"]

AWAITS_ANOTHER = Busy(None, None, same_work=True, started=True)
"""The answer to a message of a run for which the message of another call is stored."""


def claim_run(database: Database, request: ClaimRequest) -> ClaimAnswer:
    """Find the run of the message, and claim it, in one transaction."""
    with database.transaction(lock_timeout_s=database.lock_timeout_s, claim=True) as db:
        if request.row is not None:
            rows.read(db, request.row, lock=True)  # its lock comes before the pointer's
        run, answer = _claim(database, db, request)
        if _ended_meanwhile(run, answer):
            run, answer = _claim(database, db, request)
        if isinstance(answer, Claimed) or _is_dead(answer):
            run.settle(database, db)
        if isinstance(answer, Claimed) and run.request.resumes:
            run.name_in_call(db, answer.claim)
    return run.named(answer) if isinstance(answer, Answer) else answer


def _claim(database: Database, db: sa.Connection, request: ClaimRequest) -> tuple[Run, ClaimAnswer]:
    run = run_of(database, db, request)
    if run.found.waits:
        return run, run.busy
    found = peek_in(database, db, run.request)
    if awaits_another(run.request, found):
        return run, AWAITS_ANOTHER
    if found.decision in CLAIMABLE or found.decision is Decision.BURY:
        return run, LockedClaim(database, db, run.request).decide()
    settle(db, run.request, found)
    return run, found.answer(run.request)


def _ended_meanwhile(run: Run, answer: ClaimAnswer) -> bool:
    """Return whether the open run ended after it was read, so that a new message came too late.

    An end is final, and the pointer is locked. So the message opens the next run.
    """
    ended = Decision.DONE, Decision.FAILED, Decision.REVOKED
    return run.found.joins and isinstance(answer, Answer) and answer.decision in ended


def awaits_another(request: ClaimRequest, found: Seen) -> bool:
    """Return whether a run waits for the message of its stored call, which is not this one.

    A call that was stored by `duplicate="replace"` runs with its own arguments. The ledger sends
    its message until the run ends, or the sweep gives up.
    """
    row = found.row
    if row is None or not will_be_sent(row) or request.resumes or found.decision not in CLAIMABLE:
        return False
    return message_of(row) != request.message.name and found.decision is not Decision.SAME


def _is_dead(answer: ClaimAnswer) -> bool:
    """Return whether a message is answered that its run is DEAD, and so belongs to it."""
    dead = Decision.DEAD, Decision.BURY
    return isinstance(answer, Answer) and answer.decision in dead


def peek_run(database: Database, request: ClaimRequest) -> ClaimAnswer:
    """Return what `ports.peek()` says of the run of this message."""
    with database.transaction() as db:
        run, found = _peek(database, db, request)
        if not run.found.waits and _ended_meanwhile(run, found.answer(run.request)):
            run, found = _peek(database, db, request)
    if run.found.waits and found.decision is not Decision.SUPERSEDED:
        return run.busy
    if awaits_another(run.request, found):
        return AWAITS_ANOTHER
    answer = peeked(run.request, found)
    if not isinstance(answer, Answer):
        return answer
    if answer.decision is Decision.DEAD and run.found.joins:
        return AWAITS_ANOTHER  # this message joins the run by a claim or a deferral
    return run.named(answer)


def _peek(database: Database, db: sa.Connection, request: ClaimRequest) -> tuple[Run, Seen]:
    run = run_of(database, db, request, lock=False)
    return run, peek_in(database, db, run.request)
