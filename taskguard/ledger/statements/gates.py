"""The reasons to refuse a claim: one small class each. A claim composes the ones that it needs.

A claim locks its rows and makes a `View` of them (`claims.py`). Its gates look at the view in the
order of `gates_of()`, and the first one that refuses gives the answer. If none refuses, the claim
is written, and then `granted()` of each gate is called.

Guarantees: a gate decides by the view, and by the line of the key, which it reads under the locks
of the claim. It notes changes of the key's own row in the view, and the claim writes them.

Read next: `model/bounds.py` for slots and rates, `lines/turn.py` and `lines/newest.py` for lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import sqlalchemy as sa

from taskguard.ledger.decisions import Records, WorkRecord, busy_key
from taskguard.ledger.lines import newest, turn
from taskguard.ledger.tables import FREE, WORK
from taskguard.model.bounds import Bounds
from taskguard.model.claims import Answer, Busy, Claimed, ClaimRequest
from taskguard.model.lease import Owner
from taskguard.model.states import Decision, State, is_outdated, sent_at_us

__all__ = ["Gate", "View", "gates_of"]


@dataclass(slots=True)
class View:
    """The rows that a claim has locked, as it read them.

    Attributes:
        request: the request. If its key has slots, `keys` names the slot that the claim may get.
        decision: the decision that follows from the work's records.
        records: those records, and the time at which they were read.
        keys: the rows of the request's keys.
        base: the row of the key itself, which has the slots and the rate. None without a limit or
            a rate.
        others: the rows of other owners that hold the key or one of its slots.
        newest_row: names the newest message of the task (`lines/newest.py`). None if the task's
            messages do not supersede each other.
        noted: columns of `base` that the claim writes.
    """

    request: ClaimRequest
    decision: Decision
    records: Records
    keys: Sequence[Any]
    base: Any = None
    others: Sequence[Any] = ()
    newest_row: newest.NewestRow | None = None
    noted: dict[str, Any] = field(default_factory=dict)

    @property
    def now_us(self) -> int:
        """The database's clock."""
        return self.records.now_us

    @property
    def row(self) -> WorkRecord | None:
        """The record that decides the claim."""
        return self.records.speaking

    @property
    def bounds(self) -> Bounds:
        """The limit and rate of the key, for gates that exist only if it has any."""
        assert self.request.bounds is not None  # noqa: S101
        return self.request.bounds

    @property
    def live(self) -> list[Any]:
        """The rows of the request's keys that other owners hold."""
        owner, now_us = str(self.request.owner), self.records.now_us
        return [key for key in self.keys if key.owner != owner and key.lease_until > now_us]

    @property
    def is_mine(self) -> bool:
        """Whether this owner already has all keys of the request."""
        owner = str(self.request.owner)
        return all(key.owner == owner for key in self.keys)

    @property
    def is_again(self) -> bool:
        """Whether the same owner repeats a granted request, which is no new start."""
        return self.decision is Decision.SAME and self.is_mine

    def supersedes(self) -> bool:
        """Whether the key's holder is an older message of the task, which loses the key."""
        if not self.request.replaces_holder or self.newest_row is None:
            return False
        return any(key.fence == self.newest_row.fence for key in self.live)

    @property
    def room(self) -> int:
        """How many more deliveries may hold the key."""
        bounds = self.request.bounds
        return 1 if bounds is None else bounds.limit - len(self.others)

    @property
    def created_us(self) -> int:
        """When the work's record was made."""
        return self.now_us if self.row is None else self.row.created

    @property
    def sent_us(self) -> int:
        """When the message was sent, to compare messages that supersede each other."""
        return sent_at_us(self.request.sent_us, created_us=self.created_us)

    def busy(self, until_us: int | None = None, *, too_early: bool = False) -> Busy:
        """Return Busy without a holder that could be named."""
        after_s = None if until_us is None else max(0.0, (until_us - self.now_us) / 1e6)
        started = self.row is not None and self.row.attempts > 0
        return Busy(None, after_s, same_work=False, started=started, too_early=too_early)


class Gate:
    """One reason to refuse a claim."""

    may_end: ClassVar[bool] = False
    """Whether it may end the work for good. If so, it comes before the check for DEAD work."""

    def refuse(self, view: View) -> Busy | Answer | None:
        """Return why the claim is not granted, or None."""
        raise NotImplementedError

    def granted(self, view: View, claimed: Claimed) -> Claimed:
        """Do what follows from the grant, and return the answer for the new holder."""
        del view
        return claimed


class Holder(Gate):
    """Refuses if another owner holds one of the keys, and does not lose it to this message."""

    def refuse(self, view: View) -> Busy | None:
        live = view.live
        if not live or view.supersedes():
            return None
        last = max(live, key=lambda key: key.lease_until)
        return busy_key(last.owner, last.lease_until, view.row, view.now_us)


class Slots(Gate):
    """Refuses if as many deliveries hold the key as its limit allows, or if it is paused.

    Holders of a former, higher limit count, too. The key's row has the number of slots at the last
    claim.
    """

    def refuse(self, view: View) -> Busy | None:
        for other in view.others:  # a pause has the key's own row, and so all slots
            if other.key == view.bounds.key and Owner.parse(other.owner).is_pause:
                return busy_key(other.owner, other.lease_until, view.row, view.now_us)
        live = view.live
        if view.is_again or (live and len(view.bounds.slots) <= 1):
            return None  # `Holder` names the holder of the only slot
        if not live and view.room > 0:
            return None
        return view.busy(min(row.lease_until for row in (*live, *view.others)))

    def granted(self, view: View, claimed: Claimed) -> Claimed:
        if view.is_again:
            return claimed
        slots, before = view.bounds.slots, view.base
        view.noted["slots"] = view.bounds.limit if slots else None
        if slots and before.owner == FREE:
            # A purge sees by the fence that the key is in use. A holder of the key keeps its own.
            view.noted["fence"] = max(before.fence, view.now_us)
        return claimed


class Turn(Gate):
    """Refuses if a message that goes first waits, was promoted a moment ago, or has not ended.

    If this message supersedes older ones of its task, those do not count.
    """

    def __init__(self, db: sa.Connection) -> None:
        self._db = db

    def refuse(self, view: View) -> Busy | None:
        # A message that takes the key from its holder takes the turn of no other message.
        if view.is_again or view.supersedes():
            return None
        request = view.request
        but = None if request.newest is None else request.task
        behind = turn.is_behind(self._db, request, view.now_us, room=view.room, but=but)
        return view.busy() if behind else None


class RateOfStarts(Gate):
    """Refuses until the key's rate allows its next start. A granted start is charged."""

    def refuse(self, view: View) -> Busy | None:
        opens_us = self._opens_us(view)
        if view.is_again or opens_us <= view.now_us:
            return None
        # Noted, because otherwise a clock that was set back would delay the start each time.
        view.noted["next_start"] = opens_us
        return view.busy(opens_us, too_early=True)

    def granted(self, view: View, claimed: Claimed) -> Claimed:
        rate = view.bounds.rate
        if rate is not None and not view.is_again:
            view.noted["next_start"] = rate.charged_us(self._opens_us(view), view.now_us)
        return claimed

    @staticmethod
    def _opens_us(view: View) -> int:
        rate = view.bounds.rate
        return 0 if rate is None else rate.opens_us(view.base.next_start, view.now_us)


class Newest(Gate):
    """Ends the work if a newer message of the task has begun, or waits: this one never runs.

    Otherwise this message is the newest. If it is granted, the older work ends: FAILED, final, with
    the reason, in the transaction that raises the key's fence.
    """

    may_end = True

    def __init__(self, db: sa.Connection) -> None:
        self._db = db

    def refuse(self, view: View) -> Busy | Answer | None:
        if view.is_again:
            return None
        newer = self._newer(view)
        if newer is None:
            return view.busy() if _is_held_elsewhere(view) else None
        now_us, created_us = view.now_us, view.created_us
        row = view.row
        return newest.end(
            self._db, view.request, row, by=newer, now_us=now_us, created_us=created_us
        )

    def _newer(self, view: View) -> str | None:
        """Return the work of a newer message that has begun, or waits."""
        waits = self._line(view).newest()
        newest_row = _newest_row(view)
        others = {newest_row.work: newest_row.stamp_us}
        if waits is not None:
            others[waits.id] = waits.parked
        if not is_outdated(view.sent_us, others_us=list(others.values())):
            return None
        return max(others, key=lambda work: others[work] or 0)

    def _line(self, view: View) -> newest.Line:
        return newest.Line(self._db, view.request, view.now_us)

    def granted(self, view: View, claimed: Claimed) -> Claimed:
        newest_row, work = _newest_row(view), str(view.request.work)
        if newest_row.work != work:
            self._end_older(view, newest_row, by=work)
        # If the owner repeats its request, it has superseded them. Later ones are newer than it.
        replaced = () if view.is_again else self._line(view).replace(by=work)
        newest_row.move(fence=claimed.claim.fence, work=work, stamp_us=view.sent_us)
        over = [Owner.parse(key.owner) for key in view.live]
        return replace(claimed, over=over[0] if over else None, replaced=replaced)

    def _end_older(self, view: View, newest_row: newest.NewestRow, *, by: str) -> None:
        """Move the last work that has begun PROCESSING -> FAILED, final, even if it is dead."""
        older = sa.select(WORK).where(WORK.c.id == newest_row.work).with_for_update()
        row = self._db.execute(older).first()
        if row is None or row.state != State.PROCESSING.value or row.fence != newest_row.fence:
            return
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        ended = {**newest.outdated_values(by, view.now_us), **newest.NOTIFIED}
        self._db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**ended))


def _newest_row(view: View) -> newest.NewestRow:
    assert view.newest_row is not None  # noqa: S101  # locked by the claim of such a request
    return view.newest_row


def _is_held_elsewhere(view: View) -> bool:
    """Return True if the lock server's holder is about to claim the key, or to end."""
    held_by, [key] = view.request.held_by, view.keys
    if held_by is None or key.owner == str(held_by):
        return False
    return not view.live


_HOLDER, _SLOTS, _RATE = Holder(), Slots(), RateOfStarts()
_ALONE: tuple[Gate, ...] = (_HOLDER,)


def gates_of(request: ClaimRequest, db: sa.Connection) -> tuple[Gate, ...]:
    """Return the gates of a claim, in the order in which they decide.

    The rate comes last, so that a start is charged only if no other gate refuses.
    """
    bounds = request.bounds
    if not request.in_line and bounds is None and request.newest is None:
        return _ALONE
    gates: list[Gate] = []
    if request.newest is not None:
        gates.append(Newest(db))
    if bounds is not None:
        gates.append(_SLOTS)
    gates.append(_HOLDER)
    if request.in_line:
        gates.append(Turn(db))
    if bounds is not None and bounds.rate is not None:
        gates.append(_RATE)
    return tuple(gates)
