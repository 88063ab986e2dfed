"""MariaDB with PyMySQL: a first claim and a completion are one compound statement each.

So each takes one round trip. The statements are in the .sql files of this folder.

Guarantees: the answers are those of the portable statements. These decide whatever one message
cannot: a takeover, a race with another claim, several keys, or a row of the user. After a claim no
transaction is open, even if it failed.

Only for connections of the ledger's own Engine. MySQL allows compound statements only in
procedures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.ledger.connections.dialects.mysql import is_ended
from taskguard.ledger.decisions import CLAIMABLE, answer, busy_key, claimed, decide_row
from taskguard.ledger.history import line_of
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.statements.portable import Statements
from taskguard.ledger.stored import statement
from taskguard.model.claims import Claim, ClaimAnswer, ClaimRequest
from taskguard.model.states import Decision

__all__ = ["MariaDBStatements"]

_CLAIM = statement(__package__, "claim")
_COMPLETE = statement(__package__, "complete")
_COMPLETE_ALONE = statement(__package__, "complete_alone")


class _Found(NamedTuple):
    """The one row of claim.sql.

    It has one of three forms: a grant; the key's holder, if there is one, without a `state`; or the
    work's record, with the columns that an answer needs.
    """

    now_us: int
    granted_fence: int | None
    owner: str | None = None
    lease_until: int = 0
    recorded_retries: int = 0
    recorded_deferrals: int = 0
    state: str = ""
    final: int = 0
    message: str = ""
    retries: int = 0
    fence: int = 0
    crashes: int = 0
    fingerprint: str | None = None
    result: str | None = None
    error: str | None = None
    finished: int | None = None
    trace: str | None = None


class MariaDBStatements(Statements):
    """First claims, and completions of one key, in one message each."""

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        plain = request.work is not None and request.row is None and not request.formerly
        plain = plain and not request.in_line and request.bounds is None and request.newest is None
        found = self._claim_first(request) if plain and len(request.keys) == 1 else None
        return super().claim(request) if found is None else found

    def _claim_first(self, request: ClaimRequest) -> ClaimAnswer | None:
        values = {
            "key": request.keys[0],
            "owner": str(request.owner),
            "ttl_us": int(request.ttl_s * 1e6),
            "work": request.work,
            "line": line_of(str(request.work)),
            "task": request.task,
            "message": request.message.name,
            "retries": request.message.retries,
            "deferrals": request.message.deferrals,
            "may_create": request.may_create,
            "fingerprint": request.fingerprint,
            "call": request.call,
            "trace": request.trace,
            "recoverable": request.call is not None,  # so that the call is sent only once
        }
        try:
            found = self.database.ask_apart(_CLAIM, values)
        except self.database.engine.dialect.loaded_dbapi.Error:
            # A text may be too long, or the session may parse statements differently (sql_mode =
            # 'ORACLE'). The portable statements succeed, or raise SQLAlchemy's error.
            return None
        return _answered(request, _Found(*found[0])) if found else None

    def complete_in_block(self, db: sa.Connection, claim: Claim, result_json: str | None) -> bool:
        if not self.sees_the_end(claim):
            return super().complete_in_block(db, claim, result_json)
        if claim.row is not None:
            rows.move_to_done(db, claim)
        try:
            found = self.database.ask_in(db, _COMPLETE, _ending(claim, result_json))
        except self.database.engine.dialect.loaded_dbapi.Error as error:
            if is_ended(error):
                return False
            raise
        return found == [(1,)]

    def sees_the_end(self, claim: Claim) -> bool:
        return len(claim.keys) == 1 and not claim.formerly and not claim.request.strict

    def complete_alone(self, claim: Claim, result_json: str | None) -> bool | None:
        if claim.row is not None or not self.sees_the_end(claim):
            return None
        try:
            found = self.database.ask_apart(_COMPLETE_ALONE, _ending(claim, result_json))
        except self.database.engine.dialect.loaded_dbapi.Error:
            return None  # the portable statements decide, as for a claim
        return found == [(1,)]


def _ending(claim: Claim, result_json: str | None) -> dict[str, Any]:
    return claim.name | {"key": claim.keys[0], "result": result_json}


def _answered(request: ClaimRequest, found: _Found) -> ClaimAnswer | None:
    if found.granted_fence is not None:
        return claimed(request, found.granted_fence, None, Decision.CREATE)
    if not found.state and found.owner is not None:
        return busy_key(found.owner, found.lease_until, None, found.now_us)
    row: Any = found if found.state else None  # without a state there is no record
    recorded = found.recorded_retries, found.recorded_deferrals
    decision = decide_row(request, row, recorded, found.now_us)
    if decision in CLAIMABLE or decision is Decision.BURY:
        return None
    return answer(request, row, decision, found.now_us, recorded=recorded)
