"""Errors for a holder whose transaction was not committed.

Guarantees: each names the key and the fence, and says that nothing was written.
"""

from __future__ import annotations

from taskguard.errors import StaleTokenError, TransactionRetryError, TransactionUsageError
from taskguard.ledger.connections.errors import ConnectionBrokenError
from taskguard.model.claims import Claim

__all__ = [
    "broken_in_block",
    "ended_in_block",
    "failed_in_block",
    "key_of",
    "lock_not_given",
    "stale",
    "too_long_in_block",
]


def key_of(claim: Claim) -> str:
    """Return the claim's keys as text for errors."""
    return ", ".join(claim.keys)


def stale(claim: Claim) -> StaleTokenError:
    return StaleTokenError(
        f"The database refused to commit {key_of(claim)} with fence {claim.fence}: a newer holder "
        "exists, or the claim is gone after a crash of the database. Nothing was written.",
        key=key_of(claim),
        fence=claim.fence,
    )


def lock_not_given(claim: Claim) -> TransactionRetryError:
    return TransactionRetryError(
        f"The transaction of {key_of(claim)} was rolled back: it waited too long for a row lock. "
        "Run it again.",
        key=key_of(claim),
        fence=claim.fence,
    )


def ended_in_block(claim: Claim) -> TransactionUsageError:
    return _misused(
        claim,
        f"The guarded transaction of {key_of(claim)} was ended or left in the block (by commit(), "
        "rollback(), close(), a Session's rollback(), or in a forked child). It must end with the "
        "block. Use begin_nested() for parts that may fail, and checkpoint() for parts that "
        "commit.",
    )


def failed_in_block(claim: Claim) -> TransactionUsageError:
    return _misused(
        claim,
        f"A statement in the guarded transaction of {key_of(claim)} failed, and the body caught "
        "the error. PostgreSQL accepts no further statement, and nothing was written. Raise the "
        "error again, or put the part that may fail into begin_nested().",
    )


def too_long_in_block(claim: Claim, size: int, limit: int) -> TransactionUsageError:
    return _misused(
        claim,
        f"A statement of {size:,} bytes in the guarded transaction of {key_of(claim)} exceeds the "
        f"server's max_allowed_packet ({limit:,} bytes). The server closed the connection, and "
        "nothing was written. Write in smaller parts, or raise that setting.",
    )


def _misused(claim: Claim, text: str) -> TransactionUsageError:
    return TransactionUsageError(text, key=key_of(claim), fence=claim.fence)


def broken_in_block(claim: Claim, *, idle_s: float | None = None) -> TransactionRetryError:
    hint = ""
    if idle_s is not None:
        hint = (
            f" If this happens again: the server ends a transaction that idles for {idle_s:g} s. "
            "Do long computations before the transaction."
        )
    return ConnectionBrokenError(
        f"The connection broke in the guarded transaction of {key_of(claim)}. Nothing was "
        f"written.{hint}",
        key=key_of(claim),
        fence=claim.fence,
    )
