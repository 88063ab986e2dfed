"""Lets operators change work and keys: `ports.Actions`.

Guarantees: each change is one transaction with its row in `taskguard_actions`. A call that is
repeated, because its COMMIT got no answer, records one action. No delivery imports the statements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskguard.ledger.connections.errors import LockTimeoutError
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.parts.base import Part
from taskguard.model.history import Action
from taskguard.model.policy import MOST_ROWS, check_number

if TYPE_CHECKING:
    from taskguard.model.changes import Changed, Expected, PauseTried, Said
    from taskguard.model.claims import RowRef
    from taskguard.model.lease import Owner
    from taskguard.model.pauses import Pause

__all__ = ["SqlActions"]

_ACTOR, _REASON = "an operator", "no reason was given"


class SqlActions(Part):
    """Changes by operators."""

    @retried
    def change(
        self,
        work: str,
        action: Action,
        *,
        by: Said,
        gone_s: float = 0.0,
        expected: Expected | None = None,
        row: RowRef | None = None,
    ) -> Changed:
        """Change work, or return why it cannot change; see `ports.py`."""
        from taskguard.ledger.operations import changes  # not for deliveries

        if row is not None:
            self._check_rows([changes.declared_of(row)])
        by = self._stored(by)
        return changes.change(
            self._database, work, action, by=by, gone_s=gone_s, expected=expected, row=row
        )

    def requeue(self, work: str, *, reason: str, actor: str = _ACTOR) -> bool:
        """Move DEAD or FAILED -> NEW, so that the next delivery runs the work; see `ports.py`."""
        from taskguard.model.changes import Said

        return self.change(work, Action.REQUEUE, by=Said(actor, reason)).changed

    @retried
    def release(
        self, key: str, *, fence: int, owner: str, by: Said | None = None
    ) -> tuple[str, ...]:
        """End the lease of a holder that is known to be gone; see `ports.py`."""
        from taskguard.ledger.operations import pausing

        said = self._stored(by)
        return pausing.release(self._database, key, fence=fence, owner=owner, by=said)

    @retried
    def try_pause(
        self,
        key: str,
        *,
        owner: Owner,
        by: Said,
        lease_s: float = 15.0,
        now: bool = False,
        also: tuple[Owner, ...] = (),
    ) -> PauseTried:
        """Pause a key, or keep others from its free slots until it can be paused."""
        from taskguard.ledger.operations import pausing
        from taskguard.model.changes import PauseTried

        said = self._stored(by)
        try:
            return pausing.try_pause(
                self._database, key, owner=owner, by=said, lease_s=lease_s, now=now, also=also
            )
        except LockTimeoutError:
            if now:
                raise
            return PauseTried(False)  # a holder's transaction has the row: it is waited for

    @retried
    def give_up_pause(self, key: str, *, owner: Owner) -> None:
        """Free a key whose pause still waited for holders."""
        from taskguard.ledger.operations import pausing

        pausing.give_up_pause(self._database, key, owner=owner)

    @retried
    def resume(self, key: str, *, owner: Owner, by: Said) -> bool:
        """End the pause of a key, and each that began before it; see `ports.py`."""
        from taskguard.ledger.operations import pausing

        return pausing.resume(self._database, key, owner=owner, by=self._stored(by))

    @retried
    def paused(self, *, limit: int = 100) -> list[tuple[str, Pause]]:
        """Return the keys that are paused, in order."""
        from taskguard.ledger.operations import pausing

        check_number("limit", limit, at_least=1, at_most=MOST_ROWS, whole=True)
        return pausing.paused_keys(self._database, limit=limit)

    @retried
    def pause_of(self, keys: tuple[str, ...]) -> Owner | None:
        """Return the owner that stands for the pause of one of these keys, or None."""
        from taskguard.ledger.operations import pausing

        return pausing.pause_of(self._database, keys)

    def _stored(self, by: Said | None) -> Said:
        """Return actor and reason with only such characters as the database can store."""
        from taskguard.model.changes import Said

        by = by or Said(_ACTOR, _REASON)
        return Said(self._storable(by.actor), self._storable(by.reason))
