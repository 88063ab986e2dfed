"""PostgreSQL 14 or later, with psycopg: each change of a claim is one statement.

So it takes one round trip. The statements are in the .sql files of this folder.

Guarantees: the answers are those of the portable statements. These decide whatever a single
statement cannot see: a race with another claim, a burial, several keys, or former ids.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.connections.dialects.postgresql import bounding, milliseconds
from taskguard.ledger.connections.errors import LockTimeoutError
from taskguard.ledger.connections.libpq import Commit
from taskguard.ledger.lines import postgresql as lines
from taskguard.ledger.lines.postgresql import position
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.records import ToSend
from taskguard.ledger.refusals import ended_in_block, stale
from taskguard.ledger.statements.portable import Statements
from taskguard.ledger.statements.postgresql import own_row
from taskguard.ledger.statements.postgresql.answers import (
    Found,
    FoundKey,
    answer_of,
    busy_of,
    refusal_of,
)
from taskguard.ledger.stored import statement
from taskguard.ledger.tables import FREE, KEYS
from taskguard.locks.base import Renewal
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import Claim, ClaimAnswer, Claimed, ClaimRequest, RowRef
from taskguard.model.states import REPLACED_RETRIES, RowState, State

__all__ = ["PostgreSQLStatements"]

_CLAIMS_PER_STATEMENT = 1000


_CLAIM = statement(__package__, "claim", position=position.NONE)
_CLAIM_FIRST = statement(__package__, "claim_first")
_CLAIM_IN_LINE = statement(__package__, "claim", in_line=lines.IN_LINE, position=position.NONE)
_CLAIM_FIRST_IN_LINE = statement(__package__, "claim_first", in_line=lines.IN_LINE)
_OF_POSITION = {
    "in_line": lines.IN_LINE,
    "position_columns": position.COLUMNS,
    "position_values": position.VALUES,
}
_CLAIM_STRICT = statement(__package__, "claim", position=position.KEPT, **_OF_POSITION)
_CLAIM_FIRST_STRICT = statement(__package__, "claim_first", **_OF_POSITION)
_RECORDS = statement(__package__, "records")
_CLAIM_KEY = statement(__package__, "claim_key")
_COMPLETE = statement(__package__, "complete")
_OR_ERROR = statement(__package__, "or_error")
_COMPLETE_OR_FAIL = statement(__package__, "complete", or_error=_OR_ERROR)
_COMPLETE_STRICT = statement(__package__, "complete", no_position=position.NONE)
_COMPLETE_STRICT_OR_FAIL = statement(
    __package__, "complete", no_position=position.NONE, or_error=_OR_ERROR
)
# The error of or_error.sql, without the quotes around it, which depend on the server's language.
_ENDED, _STALE = "taskguard: ", "taskguard: begun"
_RENEW = statement(__package__, "renew")
_STORE_RESULT = statement(__package__, "store_result")
_NOTE = statement(__package__, "note")


class _FoundHold(NamedTuple):
    """A row of renew.sql."""

    owner: str
    state: str | None
    is_current: bool
    renewed: bool


class PostgreSQLStatements(Statements):
    """Statements that decide alone where possible, and fall back to the portable ones."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._lock_timeout = str(milliseconds(database.lock_timeout_s))

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        if request.bounds is not None or request.newest is not None or not _is_simple(request):
            return super().claim(request)
        # A statement that finds no answer may have taken the key: another claim took the work.
        try:
            found = self._claim_alone(request)
            decided = super().claim(request) if found is None else found
        except (LockTimeoutError, TransactionRetryError):
            self._free_keys(request)
            raise
        if found is None and not isinstance(decided, Claimed):
            self._free_keys(request)
        return decided

    def _claim_alone(self, request: ClaimRequest) -> ClaimAnswer | None:
        """Return the answer of a single statement, or None if it cannot decide."""
        if request.work is None:
            return self._claim_key(request)
        if request.row is None:
            return self._claim_work(request)
        return None if request.in_line else self._claim_with_row(request)

    def _claim_work(self, request: ClaimRequest) -> ClaimAnswer | None:
        asked = self._asked(request)
        if _is_first(request):
            text = _CLAIM_FIRST_IN_LINE if request.in_line else _CLAIM_FIRST
            text = _CLAIM_FIRST_STRICT if request.strict else text
            granted = self.database.ask(text, asked)
            if granted:
                return Claimed(Claim(request, granted[0][0]))
            refusal = refusal_of(request, Found(*self.database.ask(_RECORDS, asked)[0]))
            if refusal is not None:
                return refusal
        text = _CLAIM_IN_LINE if request.in_line else _CLAIM
        text = _CLAIM_STRICT if request.strict else text
        return answer_of(request, Found(*self.database.ask(text, asked)[0]))

    def _claim_key(self, request: ClaimRequest) -> ClaimAnswer | None:
        found = FoundKey(*self.database.ask(_CLAIM_KEY, self._asked(request))[0])
        if found.granted_fence is not None:
            return Claimed(Claim(request, found.granted_fence))
        return busy_of(found, None, found.now_us)

    def _claim_with_row(self, request: ClaimRequest) -> ClaimAnswer | None:
        """Claim with the user's own row in the statement. Return None unless the claim is granted.

        The statement grants only if the row is NEW.
        """
        assert request.row is not None  # noqa: S101
        dialect = self.database.engine.dialect
        text = own_row.claiming(rows.declared_of(request.row), dialect)
        values = self._asked(request) | own_row.values(request.row, dialect)
        answered = answer_of(request, Found(*self.database.ask(text, values)[0]), RowState.NEW)
        return answered if isinstance(answered, Claimed) else None

    def _asked(self, request: ClaimRequest) -> dict[str, object]:
        values: dict[str, object] = {
            "key": request.keys[0],
            "owner": str(request.owner),
            "ttl_us": int(request.ttl_s * 1e6),
            "lock_timeout": self._lock_timeout,
        }
        if request.work is None:
            return values
        return values | {
            "work": request.work,
            "task": request.task,
            "message": request.message.name,
            "retries": request.message.retries,
            "deferrals": request.message.deferrals,
            "max_crashes": request.max_crashes,
            # The user's own row shows whether the work is done, even after a purge.
            "may_create": request.may_create or request.row is not None,
            "fingerprint": request.fingerprint,
            "call": request.call,
            "trace": request.trace,
            "rank": request.rank,
            "strict": request.strict,
            "sent_us": request.sent_us,
            "expires_us": request.expires_us,
        }

    def _free_keys(self, request: ClaimRequest) -> None:
        with self.database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            db.execute(
                sa.update(KEYS)
                .where(KEYS.c.key.in_(request.keys), KEYS.c.owner == str(request.owner))
                .values(owner=FREE, lease_until=0)
            )

    # -- a holder's transaction ---------------------------------------------------------------

    def admit(self, db: sa.Connection, claim: Claim, *, idle_s: float) -> tuple[str | None, bool]:
        [(level, seen, *_)] = self.database.ask_in(db, _admitting(idle_s), claim.name)
        return level, seen

    def complete_in_block(self, db: sa.Connection, claim: Claim, result_json: str | None) -> bool:
        if not self.sees_the_end(claim):
            return super().complete_in_block(db, claim, result_json)
        values = _ending(claim, result_json, begun=True)
        if claim.row is None:
            text = _COMPLETE_STRICT if claim.request.strict else _COMPLETE
            return bool(self.database.ask_in(db, text, values))
        if self.database.ask_in(db, *self._completing(claim.row, values)):
            return True
        rows.confirm(db, claim)
        return False

    def complete_with_commit(
        self, db: sa.Connection, claim: Claim, result_json: str | None
    ) -> Commit:
        driver: Any = self.database.engine.dialect.loaded_dbapi
        values = _ending(claim, result_json, begun=True)
        try:
            text = _COMPLETE_STRICT_OR_FAIL if claim.request.strict else _COMPLETE_OR_FAIL
            return self.database.ask_and_commit(db, text, values)
        except driver.errors.InvalidTextRepresentation as error:
            if _STALE in str(error):
                raise stale(claim) from None
            if _ENDED in str(error):
                raise ended_in_block(claim) from None
            raise

    def ends_at_once(self, claim: Claim) -> bool:
        # With a row of the user, a refusal is explained by reading that row in the transaction.
        return self.database.begins_itself and self.sees_the_end(claim) and claim.row is None

    def sees_the_end(self, claim: Claim) -> bool:
        strict = claim.request.strict and claim.row is not None
        return _is_simple(claim.request) and not strict

    def complete_alone(self, claim: Claim, result_json: str | None) -> bool | None:
        if not self.sees_the_end(claim):
            return None
        values = _ending(claim, result_json, begun=False)
        if claim.row is None:
            text = _COMPLETE_STRICT if claim.request.strict else _COMPLETE
            return bool(self.database.ask(text, values))
        try:
            return bool(self.database.ask(*self._completing(claim.row, values)))
        except self.database.engine.dialect.loaded_dbapi.Error:
            return None  # the user's table refuses the change, for example by a constraint

    def _completing(self, ref: RowRef, values: dict[str, object]) -> tuple[str, dict[str, Any]]:
        dialect = self.database.engine.dialect
        text = own_row.completing(rows.declared_of(ref), dialect)
        return text, values | own_row.values(ref, dialect)

    def store_result(self, claim: Claim, result_json: str) -> None:
        if claim.formerly:
            super().store_result(claim, result_json)
            return
        values = claim.name | {"result": result_json, "lock_timeout": self._lock_timeout}
        self.database.ask(_STORE_RESULT, values)

    def note(self, claim: Claim, progress_json: str) -> bool:
        if claim.formerly:
            return super().note(claim, progress_json)
        values = claim.name | {"progress": progress_json, "lock_timeout": self._lock_timeout}
        return bool(self.database.ask(_NOTE, values))

    # -- lines --------------------------------------------------------------------------------

    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        if request.max_waiting is not None or request.formerly:
            return super().park(request, only_new=only_new)
        asked = {"key": request.line, "only_new": only_new, "replaced": REPLACED_RETRIES}
        return bool(self.database.ask(lines.PARK, self._asked(request) | asked))

    def promote_next(
        self,
        key: str,
        *,
        app: str,
        queues: Sequence[str] | None,
        expected_s: float,
        bounds: Bounds | None = None,
        ahead_s: float | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> ToSend | None:
        if ahead_s is not None:
            return super().promote_next(
                key,
                app=app,
                queues=queues,
                expected_s=expected_s,
                bounds=bounds,
                ahead_s=ahead_s,
                rates=rates,
            )
        values = {
            "key": key,
            "app": app,
            # Sent as a text, because `libpq.py` can send no lists.
            "queues": None if queues is None else json.dumps(list(queues)),
            "expected_us": int(expected_s * 1e6),
            "lock_timeout": self._lock_timeout,
        }
        found = self.database.ask(lines.PROMOTE_NEXT, values)
        return None if not found else ToSend(*found[0])

    # -- leases -------------------------------------------------------------------------------

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(claims), _CLAIMS_PER_STATEMENT):
            answers += self._renew(claims[start : start + _CLAIMS_PER_STATEMENT])
        return answers

    def _renew(self, claims: Sequence[Claim]) -> list[str]:
        asked = [(claim, key, work) for claim in claims for key, work in _pairs(claim)]
        found = self.database.ask(
            _RENEW,
            {
                "owners": [str(claim.owner) for claim, _, _ in asked],
                "fences": [claim.fence for claim, _, _ in asked],
                "work_ids": [work for _, _, work in asked],
                "ttls_us": [int(claim.request.ttl_s * 1e6) for claim, _, _ in asked],
                "keys": [key for _, key, _ in asked],
                "lock_timeout": self._lock_timeout,
            },
            renewal=True,
        )
        by_owner = {row.owner: row for row in map(_FoundHold._make, found)}
        return [_renewal(claim, by_owner[str(claim.owner)]) for claim in claims]


def _is_first(request: ClaimRequest) -> bool:
    """Return True if a record is unlikely: nothing says that the message was delivered before."""
    message = request.message
    before = request.redelivered or message.retries or message.deferrals
    return request.may_create and not before


def _is_simple(request: ClaimRequest) -> bool:
    """Return True if one statement can decide the claim."""
    row = request.row
    return len(request.keys) == 1 and not request.formerly and (row is None or own_row.fits(row))


def _ending(claim: Claim, result_json: str | None, *, begun: bool) -> dict[str, object]:
    """Return the values of a completion.

    `begun`: it runs in the holder's transaction, and must not run in a later one.
    """
    values = {"key": claim.keys[0], "result": result_json, "begun": begun}
    return claim.name | values


@functools.cache
def _admitting(idle_s: float) -> str:
    return statement(__package__, "admit", bounds=bounding(idle_s))


def _pairs(claim: Claim) -> list[tuple[str, str | None]]:
    """Return pairs of a key and a record that contain all of both, as few as possible."""
    keys, work_ids = claim.keys, claim.work_ids or (None,)
    number = max(len(keys), len(work_ids))
    return [(keys[at % len(keys)], work_ids[at % len(work_ids)]) for at in range(number)]


def _renewal(claim: Claim, row: _FoundHold) -> str:
    if row.renewed:
        return Renewal.RENEWED
    if row.state == State.DONE.value:
        return Renewal.SKIPPED  # completed by this very claim, a moment ago
    if claim.work is not None and row.state != State.PROCESSING.value:
        return Renewal.TAKEN
    return Renewal.SKIPPED if row.is_current else Renewal.TAKEN
