"""What a holder is told whose transaction was not committed: the errors, in one place.

Guarantees: each names the key and the fence, and says that nothing was written.
"""

from __future__ import annotations

from taskguard.errors import StaleTokenError, TransactionRetryError, TransactionUsageError
from taskguard.ledger.base import Claim

__all__ = [
    "broken_in_block",
    "ended_in_block",
    "failed_in_block",
    "key_of",
    "lock_not_given",
    "stale",
]


def key_of(claim: Claim) -> str:
    """The keys, as errors name them."""
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
        f"A lock that the transaction of {key_of(claim)} wanted was not given in time.",
        key=key_of(claim),
        fence=claim.fence,
    )


def ended_in_block(claim: Claim) -> TransactionUsageError:
    return TransactionUsageError(
        f"The guarded transaction of {key_of(claim)} was ended or left in the block (by commit(), "
        "rollback(), close(), a Session's rollback(), or in a forked child). It ends with the "
        "block; for parts that may fail use begin_nested(), for parts that commit checkpoint().",
        key=key_of(claim),
        fence=claim.fence,
    )


def failed_in_block(claim: Claim) -> TransactionUsageError:
    return TransactionUsageError(
        f"A statement in the guarded transaction of {key_of(claim)} failed, and the body caught "
        "that: PostgreSQL takes no more of it, and nothing was written. Let the error go on, or "
        "put the part that may fail into begin_nested().",
        key=key_of(claim),
        fence=claim.fence,
    )


def broken_in_block(claim: Claim, *, idle_s: float | None = None) -> TransactionRetryError:
    hint = ""
    if idle_s is not None:
        hint = (
            f" (If that comes again: the server ends a transaction that idles for {idle_s:g} s. Do "
            "what takes long before it.)"
        )
    return TransactionRetryError(
        f"The connection broke in the guarded transaction of {key_of(claim)}; nothing was "
        f"written.{hint}",
        key=key_of(claim),
        fence=claim.fence,
    )
