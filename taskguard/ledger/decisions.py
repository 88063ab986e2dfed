"""Turn rows into answers of a claim. Pure, so it does not matter how the rows were read."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

from taskguard.model.claims import Answer, Busy, Claim, Claimed, ClaimRequest
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.records import StoredWork, WorkView
from taskguard.model.runs import FAILED_RUN
from taskguard.model.states import (
    OUTDATED,
    REPLACED_RETRIES,
    Decision,
    RowState,
    State,
    WorkRow,
    decide,
    decide_by_row,
    speaking_record,
)

__all__ = [
    "CLAIMABLE",
    "DecidingRow",
    "Records",
    "WorkRecord",
    "answer",
    "busy_key",
    "claimed",
    "decide_row",
    "view_of",
    "why_dead",
]

CLAIMABLE = frozenset(
    {Decision.SAME, Decision.CREATE, Decision.CLAIM, Decision.TAKEOVER, Decision.AGAIN}
)
# The decisions that are answered from the work's record.
_OF_RECORDS = frozenset(
    {Decision.DONE, Decision.DEAD, Decision.REVOKED, Decision.FAILED, Decision.OUTDATED}
)


class DecidingRow(StoredWork, Protocol):
    """The columns of `taskguard_work` that decide a claim and its answer. Times are in µs."""

    @property
    def message(self) -> str: ...
    @property
    def retries(self) -> int: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def finished(self) -> int | None: ...
    @property
    def trace(self) -> str | None: ...


class BegunRow(DecidingRow, Protocol):
    """A row that also has the number of attempts."""

    @property
    def attempts(self) -> int: ...


class ClaimedRow(BegunRow, Protocol):
    """A row that also has the columns for a new holder."""

    @property
    def progress(self) -> str | None: ...
    @property
    def line(self) -> str | None: ...


class WorkRecord(ClaimedRow, Protocol):
    """A whole row of `taskguard_work`."""

    @property
    def id(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def crashed_owner(self) -> str: ...
    @property
    def rounds(self) -> int | None: ...
    @property
    def call(self) -> str | None: ...
    @property
    def sends(self) -> int | None: ...
    @property
    def due(self) -> int | None: ...
    @property
    def parked(self) -> int | None: ...
    @property
    def created(self) -> int: ...
    @property
    def started(self) -> int | None: ...


class Records(NamedTuple):
    """The records of work: its own, then those under its former ids; None where there is none.

    With the (retries, deferrals) of the delivery's message in each, and the database's clock.
    """

    rows: tuple[WorkRecord | None, ...]
    numbers: tuple[tuple[int, int], ...]
    now_us: int

    @property
    def own(self) -> WorkRecord | None:
        """The record under the work's own id."""
        return self.rows[0]

    @property
    def _number(self) -> int:
        known = [None if row is None else (State(row.state), row.fence) for row in self.rows]
        return speaking_record(known) or 0

    @property
    def speaking(self) -> WorkRecord | None:
        """The record that a claim is decided by."""
        return self.rows[self._number]

    @property
    def recorded(self) -> tuple[int, int]:
        """The message's highest number: under the work's own id, or that of the record that counts.

        A requeue forgets them.
        """
        return max(self.numbers[0], self.numbers[self._number])

    def answer(
        self, request: ClaimRequest, decision: Decision, own_state: object = None
    ) -> Answer | Busy:
        """Return `answer()` from the record that counts. If that is a former one, name it."""
        row = self.speaking
        given = answer(request, row, decision, self.now_us, own_state, recorded=self.recorded)
        if isinstance(given, Answer) and row is not None and row.id != request.work:
            return replace(given, recorded_as=row.id)
        return given

    def claimed(self, request: ClaimRequest, fence: int, decision: Decision) -> Claimed:
        """Return `claimed()` from the record that counts, with the id under which work began."""
        return replace(claimed(request, fence, self.speaking, decision), began_as=self._began_as())

    def _began_as(self) -> str | None:
        """Return the former id if its record is older than the work's own, else None."""
        known = [row for row in self.rows if row is not None]
        first = min(known, key=lambda row: row.created, default=None)
        if first is None or (self.own is not None and first.created >= self.own.created):
            return None
        return str(first.id)


def why_dead(row: DecidingRow) -> str:
    """Return how the last holder of DEAD work ended, or which holder vanished."""
    return row.error or f"{Owner.parse(row.owner).described} vanished"


def decide_row(
    request: ClaimRequest,
    row: DecidingRow | None,
    recorded: tuple[int, int],
    now_us: int,
    row_state: RowState | None = None,
) -> Decision:
    """Return the decision of `states.decide()` for a work's row, and for the user's own row."""
    if request.work is None:
        return Decision.CREATE
    decision = decide(
        None if row is None else _work_row(row),
        owner=str(request.owner),
        message=request.message.name,
        number=request.message.number,
        recorded=recorded,
        now_us=now_us,
        max_crashes=request.max_crashes,
        # If the record was deleted, the user's own row still has the state.
        may_create=request.may_create or row_state is not None,
        fingerprint=request.fingerprint,
        resumes=request.resumes,
    )
    if row_state is None:
        return decision
    return decide_by_row(decision, None if row is None else State(row.state), row_state)


def claimed(
    request: ClaimRequest, fence: int, row: ClaimedRow | None, decision: Decision
) -> Claimed:
    """Return the answer for a new holder. `row` is the work's record before the claim."""
    claim = Claim(request, fence)
    if row is None:
        return Claimed(claim)
    takeover, again = decision is Decision.TAKEOVER, decision is Decision.AGAIN
    return Claimed(
        claim,
        attempt=row.attempts + (decision is not Decision.SAME),
        waited=row.line is not None,
        takeover=takeover,
        vanished=Owner.parse(row.owner) if takeover else None,
        crashes=0 if again else row.crashes + takeover,
        progress_json=None if again and row.state == State.DONE.value else row.progress,
        trace=row.trace if takeover else None,
    )


def answer(
    request: ClaimRequest,
    row: DecidingRow | None,
    decision: Decision,
    now_us: int,
    own_state: object = None,
    *,
    recorded: tuple[int, int],
) -> Answer | Busy:
    """Return the answer for a delivery that gets no claim.

    `own_state` is the state of the user's own row. `recorded` is the recorded number of the
    delivery's message.
    """
    if decision is Decision.BUSY:
        assert row is not None  # noqa: S101  # whose lease it is
        return Busy(
            Owner.parse(row.owner),
            (row.lease_until - now_us) / 1e6,
            same_work=True,
            started=True,
            trace=row.trace,
        )
    if decision not in _OF_RECORDS:
        replaced = decision is Decision.SUPERSEDED and recorded[0] == REPLACED_RETRIES
        by = row.message if replaced and row is not None else None
        return Answer(decision, row_state=own_state, replaced_by=by)
    if row is None or (decision is Decision.DONE and row.state != State.DONE.value):
        return Answer(decision)  # by the user's own row; there is no record of a result
    return Answer(
        decision,
        result_json=row.result,
        crashes=row.crashes,
        error=row.error,
        owner=Owner.parse(row.owner),
        same_message=row.message == request.message.name,
        age_s=max(0.0, (now_us - (row.finished or now_us)) / 1e6),
        trace=row.trace,
    )


def busy_key(owner: str, lease_until_us: int, row: BegunRow | None, now_us: int) -> Busy:
    """Busy, for other work holds the key; `row` is the record of the work that was asked for.

    Nothing is known of when a pause ends.
    """
    holder = Owner.parse(owner)
    return Busy(
        holder,
        None if holder.is_pause else (lease_until_us - now_us) / 1e6,
        same_work=False,
        started=row is not None and row.attempts > 0,
    )


def view_of(row: WorkRecord) -> WorkView:
    """A work's row, as a person sees it."""
    return WorkView(
        id=row.id,
        task=row.task,
        key=row.key,
        message=row.message,
        retries=row.retries,
        state=State(row.state),
        final=row.state == State.FAILED.value and bool(row.final),
        fence=row.fence,
        owner=row.owner,
        lease_until_s=row.lease_until / 1e6,
        attempts=row.attempts,
        crashes=row.crashes,
        progress_json=row.progress,
        result_json=row.result,
        error=row.error,
        call=row.call,
        sends=row.sends or 0,
        line=None if row.line is None else LineState(row.line),
        created_s=_seconds(row.created),
        started_s=_seconds(row.started),
        finished_s=_seconds(row.finished),
    )


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6


def _work_row(row: DecidingRow) -> WorkRow:
    return WorkRow(
        state=State(row.state),
        final=bool(row.final),
        owner=row.owner,
        fence=row.fence,
        lease_until_us=row.lease_until,
        message=row.message,
        retries=row.retries,
        crashes=row.crashes,
        fingerprint=row.fingerprint,
        outdated=(row.error or "").startswith(OUTDATED),
        gave_up=row.final == FAILED_RUN,
    )
