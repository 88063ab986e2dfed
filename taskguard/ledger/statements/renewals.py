"""Renewals of many leases in one transaction. Rows that other transactions lock are skipped."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.history import flagged
from taskguard.ledger.tables import KEYS, WORK, claimed_by
from taskguard.locks.base import Renewal
from taskguard.model.claims import Claim
from taskguard.model.history import Flag
from taskguard.model.states import State

__all__ = ["renew"]


def renew(database: Database, claims: Sequence[Claim]) -> list[str]:
    """Renew each claim whose rows are not locked, in one transaction."""
    ids = [claim.work for claim in claims if claim.work is not None]
    with database.transaction(lock_timeout_s=database.lock_timeout_s, renewal=True) as db:
        of_claims = sa.select(WORK.c.owner, WORK.c.state).where(WORK.c.id.in_(ids))
        keys = sa.select(KEYS.c.key, KEYS.c.owner, KEYS.c.fence).where(
            KEYS.c.key.in_({key for claim in claims for key in claim.keys})
        )
        states = {row.owner: row.state for row in db.execute(of_claims)}
        holders = {row.key: (row.owner, row.fence) for row in db.execute(keys)}
        locked = keys.order_by(KEYS.c.key).with_for_update(skip_locked=True)
        # If another holder got a key in between, it is not renewed. The next round finds it TAKEN.
        free_keys = {
            row.key for row in db.execute(locked) if holders.get(row.key) == (row.owner, row.fence)
        }
        locked = of_claims.order_by(WORK.c.id).with_for_update(skip_locked=True)
        free_owners = {
            row.owner for row in db.execute(locked) if row.state == State.PROCESSING.value
        }
        now_us = database.now_us(db)
        answers = []
        for claim in claims:
            answer = _reason_to_skip(claim, states, holders)
            if answer is None:
                work_is_free = claim.work is None or str(claim.owner) in free_owners
                if work_is_free and free_keys.issuperset(claim.keys):
                    _renew_one(db, claim, now_us)
                    answer = Renewal.RENEWED
                else:
                    answer = Renewal.SKIPPED  # its holder, or another claim, has locked them
            answers.append(answer)
        return answers


def _reason_to_skip(
    claim: Claim, states: dict[str, str], holders: dict[str, tuple[str, int]]
) -> str | None:
    """Return the reason not to renew the lease, or None."""
    owner = str(claim.owner)
    state = states.get(owner)
    if state == State.DONE.value:
        return Renewal.SKIPPED  # completed by this very claim, a moment ago
    if claim.work is not None and state != State.PROCESSING.value:
        return Renewal.TAKEN
    if any(holders.get(key) != (owner, claim.fence) for key in claim.keys):
        return Renewal.TAKEN
    return None


def _renew_one(db: sa.Connection, claim: Claim, now_us: int) -> None:
    until_us = now_us + int(claim.request.ttl_s * 1e6)
    db.execute(
        sa.update(KEYS)
        .where(KEYS.c.key.in_(claim.keys), KEYS.c.owner == str(claim.owner))
        .values(lease_until=until_us)
    )
    if claim.work is not None:
        due = sa.case((WORK.c.due.is_not(None), until_us))
        # The flag changes only at the first renewal.
        long = flagged(Flag.RUNS_LONG, WORK.c.started)
        update = sa.update(WORK).where(claimed_by(claim))
        db.execute(update.values(lease_until=until_us, due=due, **long))
