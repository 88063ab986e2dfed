"""Outcomes of a holder's transaction that an error ended, or whose COMMIT got no answer.

Guarantees: if the database asks for a retry or refuses something, taskguard's error is raised, even
if the body caught the driver's. The body's own errors pass unchanged. If a COMMIT gets no answer,
its outcome is found, or CommitUnknownError is raised.
"""

from __future__ import annotations

import time

import sqlalchemy as sa

from taskguard.errors import (
    CommitUnknownError,
    LedgerUnavailableError,
    TaskguardError,
    TransactionRetryError,
)
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.errors import (
    CannotWriteError,
    ConnectionBrokenError,
    LockTimeoutError,
)
from taskguard.ledger.refusals import (
    broken_in_block,
    key_of,
    lock_not_given,
    stale,
    too_long_in_block,
)
from taskguard.ledger.tables import WORK
from taskguard.ledger.transactions.block import Block
from taskguard.model.claims import Claim
from taskguard.model.states import State

__all__ = ["explain", "is_unknown", "resolve"]

_PAUSE_S = 0.2


def explain(
    database: Database,
    block: Block,
    error: BaseException,
    *,
    mine: bool,
    broken: bool,
    failed: bool,
    idle_s: float,
) -> None:
    """Raise taskguard's error if the database caused the end of the transaction.

    Otherwise return, and the caller lets the body's error pass.

    Args:
        database: the ledger's database.
        block: the driver's errors during the transaction.
        error: the error that left the body.
        mine: the error is of this connection.
        broken: the connection is lost, even if no error of the driver reported it.
        failed: the database accepts no statements until this transaction is rolled back.
        idle_s: how long the transaction may be idle, in seconds, for the error's hint.
    """
    claim = block.claim
    if block.lost is not None or broken or isinstance(error, ConnectionBrokenError):
        _refuse_too_long(database, block, error)
    if not isinstance(error, Exception) or isinstance(error, TaskguardError):
        return
    if block.lost is not None:
        raise broken_in_block(claim, idle_s=idle_s) from error
    if failed and isinstance(block.asked, TransactionRetryError):
        raise block.asked from error
    mapped = database.faults.map(error) if mine else None
    if mapped is None:
        return
    if broken or getattr(error, "connection_invalidated", False):
        raise broken_in_block(claim) from error
    if isinstance(mapped, LockTimeoutError):
        raise lock_not_given(claim) from error
    if isinstance(mapped, TransactionRetryError | CannotWriteError):
        raise mapped from error


def _refuse_too_long(database: Database, block: Block, error: BaseException) -> None:
    """Report a statement that is too long for the server as an error of the body, not an outage."""
    if not block.size or not isinstance(error, Exception):
        return
    try:
        with database.transaction() as db:
            limit = database.dialect.longest_statement(db)
    except LedgerUnavailableError:
        return
    if limit is not None and block.size >= limit:
        raise too_long_in_block(block.claim, block.size, limit) from error


def is_unknown(database: Database, error: BaseException) -> bool:
    """Return True if the outcome of the COMMIT that failed with this error is unknown.

    Return False if the COMMIT was refused: by a deferred constraint, an interrupt, or a listener of
    the user. Raises TransactionRetryError if the database asks for a retry.
    """
    mapped = database.faults.map(error)
    if isinstance(mapped, TransactionRetryError):
        raise mapped from error
    return isinstance(mapped, LedgerUnavailableError)


def resolve(
    database: Database,
    claim: Claim,
    error: BaseException,
    *,
    timeout_s: float,
    mark: str | None = None,
    session: int | None = None,
) -> None:
    """Find the outcome of a COMMIT that got no answer. Return if it happened.

    Args:
        database: the ledger's database.
        claim: the claim of the holder.
        error: the error that came instead of an answer.
        timeout_s: how long to ask, in seconds.
        mark: the mark of a checkpoint, which shows its outcome. None: a completion.
        session: the server's session, if its last message contained both completion and COMMIT.
            Until that message arrives, it has locked no row, so a wait for row locks is not enough.

    Raises:
        TransactionRetryError: it did not happen, and the claim is still valid.
        StaleTokenError: it did not happen, and cannot happen any more.
        CommitUnknownError: the outcome could not be found in this time; the error says why.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            committed, state = _ask(database, claim, mark, session, timeout_s)
            break
        except LedgerUnavailableError as unavailable:
            if time.monotonic() >= until_s:
                raise CommitUnknownError(
                    f"COMMIT of {key_of(claim)} got no answer, and taskguard could not find out "
                    f"within {timeout_s:g} s whether it happened: {unavailable} The next delivery "
                    "or call reads the record.",
                    key=key_of(claim),
                    fence=claim.fence,
                ) from unavailable
            time.sleep(_PAUSE_S)
    if committed or state is State.DONE:
        return
    if state is State.PROCESSING:
        raise TransactionRetryError(
            f"COMMIT of {key_of(claim)} did not happen.", key=key_of(claim), fence=claim.fence
        ) from error
    raise stale(claim) from error


def _ask(
    database: Database, claim: Claim, mark: str | None, session: int | None, timeout_s: float
) -> tuple[bool, State | None]:
    """Return whether the mark is stored, and the work's state if it is still this claim's."""
    with database.transaction(lock_timeout_s=timeout_s) as db:
        if session is not None and database.dialect.is_at_work(db, session):
            raise LedgerUnavailableError(
                f"The server's session {session} is open yet, and may commit it."
            )
        select = sa.select(WORK).where(WORK.c.id == claim.work)
        row = db.execute(select.with_for_update()).first()
        mine = row is not None and (row.fence, row.owner) == (claim.fence, str(claim.owner))
        stored = row.progress if row is not None and mine else None
        committed = mark is not None and database.dialect.happened(db, mark, stored=stored)
        return committed, State(row.state) if row is not None and mine else None
