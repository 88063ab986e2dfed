"""Changes of work and keys by an operator: drop, done, requeue, call now, release.

Guarantees: each change is recorded with its actor and reason, in its own transaction. Work that a
delivery runs under a live lease is refused, with the reason. After a change the line of the work's
key goes on.

Read next: `model/operating.py` for the rules, `ledger/operations/changes.py` for the SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from taskguard.errors import AlreadyEnqueuedError, TaskguardError
from taskguard.ledger.connections.errors import LockTimeoutError
from taskguard.locks.base import Holder
from taskguard.model.changes import Changed, Expected
from taskguard.model.history import Action
from taskguard.model.policy import DAY_S, check_number
from taskguard.model.texts import printable
from taskguard.operations.base import Base, logger
from taskguard.run.parking import send_stored
from taskguard.run.releasing import released

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger
    from taskguard.model.claims import RowRef

__all__ = ["Changes"]

# After this time without a renewal, the default lease of 30 s has expired for another 30 s.
_GONE_S = 30.0
_SENT_AGAIN_S = 5.0


class Changes(Base):
    """Changes by an operator. Each method takes one id of work, or several."""

    def requeue(
        self,
        works: str | Iterable[str],
        *,
        reason: str,
        actor: str | None = None,
        expected: Expected | Mapping[str, Expected] | None = None,
    ) -> list[Changed]:
        """Move DEAD or FAILED work -> NEW, so that its next delivery runs it.

        If its call is stored, a relay or the next sweep sends its message. Otherwise send its
        message again by hand: `Changed.then` says so.

        Args:
            works: one id, or several.
            reason: why, for the record.
            actor: the operator's name. By default the user and the host of this process.
            expected: what was seen of the work, or of each by its id. If it has changed since,
                nothing changes.

        Raises:
            ConfigurationError: there is no ledger, or no reason.
        """
        return self._change(Action.REQUEUE, works, reason, actor, expected)

    def requeue_left(
        self,
        works: str | Iterable[str],
        *,
        reason: str,
        actor: str | None = None,
        gone_s: float = _GONE_S,
        expected: Expected | Mapping[str, Expected] | None = None,
    ) -> list[Changed]:
        """Move PROCESSING work that no worker runs -> NEW. It counts as a crash of its holder.

        Args:
            works: one id, or several.
            reason: why, for the record.
            actor: the operator's name. By default the user and the host of this process.
            gone_s: for how many seconds its lease must have expired: the `ttl_s` of its task. By
                default 30, as `ttl_s`.
            expected: as in `requeue()`.

        Raises:
            ConfigurationError: there is no ledger, or no reason.
        """
        check_number("gone_s", gone_s, at_least=0, at_most=365 * DAY_S)
        return self._change(Action.REQUEUE_LEFT, works, reason, actor, expected, gone_s=gone_s)

    def drop(
        self,
        works: str | Iterable[str],
        *,
        reason: str,
        actor: str | None = None,
        expected: Expected | Mapping[str, Expected] | None = None,
    ) -> list[Changed]:
        """Move NEW, FAILED or DEAD work -> FAILED for good: it never runs.

        A caller that waits for a parked or enqueued message reads REVOKED. Arguments and errors
        are as in `requeue()`.
        """
        return self._change(Action.DROP, works, reason, actor, expected)

    def done(
        self,
        works: str | Iterable[str],
        *,
        reason: str,
        actor: str | None = None,
        expected: Expected | Mapping[str, Expected] | None = None,
        row: RowRef | None = None,
    ) -> list[Changed]:
        """Move NEW, FAILED or DEAD work -> DONE, because its effect was made in another way.

        Arguments and errors are as in `requeue()`. In addition:

        Args:
            works: one id, or several. One, with `row`.
            reason: why, for the record.
            actor: the operator's name.
            expected: as in `requeue()`.
            row: the user's own row of the task (`row=`), which moves to its last state in the same
                transaction. If it stays in its first state, the next delivery runs the work again.
        """
        return self._change(Action.DONE, works, reason, actor, expected, row=row)

    def call_now(
        self,
        works: str | Iterable[str],
        *,
        reason: str,
        actor: str | None = None,
        expected: Expected | Mapping[str, Expected] | None = None,
    ) -> list[Changed]:
        """Send the message of NEW work now, or put it first in the line of its key.

        Work without a stored call is refused. Arguments and errors are as in `requeue()`.
        """
        changed = self._change(Action.CALL, works, reason, actor, expected)
        for each in changed:
            if each.changed:
                self._send(each.work)
        return changed

    def release(
        self,
        key: str,
        *,
        reason: str,
        actor: str | None = None,
        fence: int | None = None,
        owner: str | None = None,
    ) -> list[Holder]:
        """Take a key from a holder that is known to be gone, as `tg.release()` does.

        With a ledger, the late commit of the holder is refused. A paused key stays paused:
        `resume()` ends that.

        Returns:
            The former holders; empty if no such holder was found.
        """
        by = self._said(Action.RELEASE, actor, reason)
        found = released(
            key,
            prefix=self._namespace,
            locks=self._runner.locks,
            ledger=cast("DatabaseLedger | None", self._runner.ledger),
            reason=by.reason,
            actor=by.actor,
            fence=fence,
            owner=owner,
        )
        for each in found:
            self.goes_on(each.key)
        return found

    def _change(
        self,
        action: Action,
        works: str | Iterable[str],
        reason: str,
        actor: str | None,
        expected: Expected | Mapping[str, Expected] | None,
        *,
        gone_s: float = 0.0,
        row: RowRef | None = None,
    ) -> list[Changed]:
        by, changed = self._said(action, actor, reason), []
        ledger = self._ledger
        for work in [works] if isinstance(works, str) else list(works):
            seen = expected.get(work) if isinstance(expected, Mapping) else expected
            try:
                found = ledger.change(work, action, by=by, gone_s=gone_s, expected=seen, row=row)
            except (AlreadyEnqueuedError, LockTimeoutError) as error:
                found = Changed(work=work, changed=False, why=str(error))
            if found.changed:
                said = printable(work), action.value, by.actor, by.reason
                logger.warning("%s: action %s by %s: %s", *said)
                self.goes_on(found.key)
            changed.append(found)
        return changed

    def _send(self, work: str) -> None:
        """Send the message of work in no line, if this process can. Otherwise a sweep does."""
        ledger = self._ledger
        for found in ledger.overdue(work=work, limit=1, parked=False) if self._senders else []:
            try:
                send_stored(found, self._senders)
            except Exception as error:  # noqa: BLE001  # whatever a broker raises
                logger.debug("%s is left to a relay: %s", work, error)
            else:
                try:
                    ledger.sent([found], again_after_s=_SENT_AGAIN_S)
                except TaskguardError as error:
                    logger.debug("%s: sent, which was not recorded: %s", work, error)
