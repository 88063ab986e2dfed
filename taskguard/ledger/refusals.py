"""What a holder is told whose transaction was not committed: the errors, in one place.

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
    return _misused(
        claim,
        f"The guarded transaction of {key_of(claim)} was ended or left in the block (by commit(), "
        "rollback(), close(), a Session's rollback(), or in a forked child). It ends with the "
        "block; for parts that may fail use begin_nested(), for parts that commit checkpoint().",
    )


def failed_in_block(claim: Claim) -> TransactionUsageError:
    return _misused(
        claim,
        f"A statement in the guarded transaction of {key_of(claim)} failed, and the body caught "
        "that: PostgreSQL takes no more of it, and nothing was written. Let the error go on, or "
        "put the part that may fail into begin_nested().",
    )


def too_long_in_block(claim: Claim, size: int, limit: int) -> TransactionUsageError:
    return _misused(
        claim,
        f"A statement of {size:,} bytes in the guarded transaction of {key_of(claim)} is beyond "
        f"what the server takes (max_allowed_packet, {limit:,} bytes); it ended the connection, "
        "and nothing was written. Write in smaller parts, or raise that setting.",
    )


def _misused(claim: Claim, text: str) -> TransactionUsageError:
    return TransactionUsageError(text, key=key_of(claim), fence=claim.fence)


def broken_in_block(claim: Claim, *, idle_s: float | None = None) -> TransactionRetryError:
    hint = ""
    if idle_s is not None:
        hint = (
            f" (If that comes again: the server ends a transaction that idles for {idle_s:g} s. Do "
            "what takes long before it.)"
        )
    return ConnectionBrokenError(
        f"The connection broke in the guarded transaction of {key_of(claim)}; nothing was "
        f"written.{hint}",
        key=key_of(claim),
        fence=claim.fence,
    )
