"""Take a key from a holder that is known to be gone, before its lease has run out.

Guarantees: the statement that ends a lease names its owner, and in the ledger its fence, too. So a
holder that took the key meanwhile keeps it. Values that taskguard did not write stay.

Does not guarantee that the holder is gone. A live holder learns of the release at its next renewal.
With a ledger its late commit is refused, because the release raises the fence of the key.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from taskguard.errors import (
    ConfigurationError,
    LedgerUnavailableError,
    LockServerUnavailableError,
)
from taskguard.keys import finish_key
from taskguard.locks.base import NO_LIMIT, NOBODY, Holder, LockProvider
from taskguard.model.history import Action
from taskguard.model.lease import Owner, limit_option
from taskguard.model.texts import printable
from taskguard.run.names import Names

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger, Records
    from taskguard.model.changes import Said

__all__ = ["release", "released"]

logger = logging.getLogger("taskguard")


def released(
    key: str,
    *,
    prefix: str,
    locks: LockProvider | None,
    ledger: DatabaseLedger | None,
    reason: str | None,
    actor: str | None,
    fence: int | None,
    owner: str | None,
) -> list[Holder]:
    """Release a key of an application, as `release()` does. `prefix`: its namespace."""
    if not key:
        raise ConfigurationError('release() needs a key, for example "inventory:42".')
    own = key.removeprefix(prefix)
    # The key as errors show it, then as lock() takes it. Another application's needs its owner.
    names = [prefix + own, prefix + finish_key(own or key), *([key] if owner else [])]
    for name in dict.fromkeys(names):
        found = release(
            name,
            locks=locks,
            ledger=ledger,
            reason=reason,
            actor=actor,
            fence=fence,
            owner=owner,
        )
        if found:
            return found
    return []


def release(
    key: str,
    *,
    locks: LockProvider | None,
    ledger: DatabaseLedger | None,
    reason: str | None = None,
    actor: str | None = None,
    fence: int | None = None,
    owner: str | None = None,
) -> list[Holder]:
    """Release a key in the ledger, then at the lock server. Return the former holders.

    Without `fence` and `owner`, release it from each holder. A shared key, or a key with slots, may
    have several holders.
    """
    if ledger is None:
        on_record = []
    elif fence is not None and owner is not None:
        on_record = [Holder(key, Owner.parse(owner), fence, 0.0)]
    else:
        on_record = ledger.holders(key)
    at_server = _at_server(locks, [key, *(each.key for each in on_record)], ledger)
    if any(each.owner == NOBODY for each in at_server):
        raise ConfigurationError(
            f"{locks!r} cannot release {key}: another process's session holds the lock, and a "
            "session lock ends with its session. End that session in the database "
            "(pg_terminate_backend(), KILL), then release the key."
        )
    released: list[Holder] = []
    by = _said(actor, reason)
    if ledger is not None:
        for each in on_record:
            if not _is_meant(each, fence=fence, owner=owner):
                continue
            # One claim may have several keys, and without one of them its commit is refused.
            keys = _end_lease(ledger, each, by, before=released)
            for held in sorted(keys, key=lambda name: name != each.key):
                released.append(replace(each, key=held))
                _release_there(locks, released[-1], ledger)
    gone = {each.owner for each in released}
    for each in at_server:
        # The ledger knows no shares. For another key, the ledger's holder counts if there is one.
        alone = ledger is None or each.shared or not (on_record or fence)
        if each.owner in gone or not alone or not _is_meant(each, fence=fence, owner=owner):
            continue
        if _release_there(locks, each, ledger):
            released.append(each)
    why = f": {reason}" if reason else ""
    names = Names(ledger)
    for each in released:
        holder = printable(names.described(each.owner))
        logger.warning("%s: released from %s%s", each.key, holder, printable(why))
    return released


def _end_lease(
    ledger: DatabaseLedger, holder: Holder, by: Said, *, before: Sequence[Holder]
) -> tuple[str, ...]:
    """End a lease in the ledger, and return its keys. An error names what was released before."""
    try:
        return ledger.release(holder.key, fence=holder.fence, owner=str(holder.owner), by=by)
    except LedgerUnavailableError as error:
        done = ", ".join(each.key for each in before)
        said = f"{error} Before that, {done} was released." if done else str(error)
        raise LedgerUnavailableError(said, key=holder.key) from error


def _said(actor: str | None, reason: str | None) -> Said:
    """Return who releases the key, and why, for the record."""
    from taskguard.model.changes import said, this_user  # not for deliveries

    return said(Action.RELEASE, actor or this_user(), reason or "no reason was given")


def _is_meant(holder: Holder, *, fence: int | None, owner: str | None) -> bool:
    """Return True for a holder of taskguard's with this fence and owner, if they are given."""
    named = owner is None or owner in (str(holder.owner), holder.owner.nonce)
    return bool(holder.owner.process) and named and fence in (None, holder.fence)


def _at_server(
    locks: LockProvider | None, keys: Sequence[str], ledger: Records | None
) -> list[Holder]:
    if locks is None:
        return []
    try:
        return [each for key in dict.fromkeys(keys) for each in locks.holders(key)]
    except LockServerUnavailableError as error:
        if ledger is None:
            raise
        logger.warning("%s: released in the ledger alone: %s", keys[0], error)
        return []


def _release_there(locks: LockProvider | None, holder: Holder, ledger: Records | None) -> bool:
    if locks is None:
        return False
    limit = NO_LIMIT if holder.shared else 1
    try:
        return locks.release((holder.key,), holder.owner, **limit_option(limit))
    except LockServerUnavailableError as error:
        if ledger is None:
            raise
        logger.warning("%s: released in the ledger alone: %s", holder.key, error)
        return False
