"""PostgreSQL's hot path (14 or later): one statement, one round trip, for each change of a claim.

Guarantees the same answers as `steps.py`; what a single statement cannot see (a race with another
claim, a burial, several keys) is answered with None, and goes there. The statements stand in
the files beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.ledger.answers import CLAIMABLE, answer, busy_key, decide_row, standing_claim
from taskguard.ledger.base import (
    Claim,
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    LedgerHold,
    RowRef,
)
from taskguard.ledger.database import Database
from taskguard.ledger.dialects.postgresql import BEGUN, MARK, milliseconds
from taskguard.ledger.postgresql import own_row
from taskguard.ledger.prepared import Prepared
from taskguard.ledger.stored import statement
from taskguard.ledger.tables import claim_values, of_claim
from taskguard.locks.base import Renewal
from taskguard.states import Decision, Place, State

__all__ = [
    "begin",
    "bound",
    "claim",
    "claim_with_row",
    "complete",
    "complete_alone",
    "complete_with_row",
    "renew",
    "store_result",
]

_HOLDS_PER_STATEMENT = 1000
_CHECK_CLIENT_MS = 2000


_CLAIM = statement(__package__, "claim")
_CLAIM_KEY = statement(__package__, "claim_key")
_COMPLETE = statement(__package__, "complete")
_RENEW = statement(__package__, "renew")
_STORE_RESULT = statement(__package__, "store_result")


class _Found(NamedTuple):
    """The one row of claim.sql: the work as it was, and what was granted."""

    now_us: int
    recorded_retries: int
    recorded_copy: int
    id: str | None
    message: str
    retries: int
    state: str
    final: int
    fence: int
    owner: str
    lease_until: int
    attempts: int
    crashes: int
    progress: str | None
    result: str | None
    error: str | None
    finished: int | None
    fingerprint: str | None
    eligible: bool
    granted_fence: int | None
    claimed_attempts: int | None
    claimed_crashes: int
    claimed_progress: str | None
    holder: str
    held_until: int | None
    flush: str | None


class _FoundKey(NamedTuple):
    """The one row of claim_key.sql."""

    now_us: int
    granted_fence: int | None
    holder: str
    held_until: int | None
    flush: str | None


class _FoundHold(NamedTuple):
    """A row of renew.sql."""

    owner: str
    state: str | None
    standing: bool
    renewed: bool


def claim(database: Database, request: ClaimRequest) -> ClaimAnswer | None:
    """Claim in one statement; None where it takes more than one to know."""
    if len(request.keys) != 1:
        return None
    values = _claim_values(database, request)
    if request.work is None:
        return _claim_key(database, request, values)
    return _answered(request, _Found(*database.ask(_CLAIM, values)[0]))


def claim_with_row(database: Database, request: ClaimRequest) -> ClaimAnswer | None:
    """The same with the user's own row in the statement, where that is NEW; else None."""
    ref = request.row
    if ref is None or len(request.keys) != 1:
        return None
    dialect = database.engine.dialect
    values = _claim_values(database, request) | own_row.values(ref, dialect)
    try:
        *found, _torn = database.ask(_with_row(database, ref).claim, values)[0]
    except dialect.loaded_dbapi.DataError as error:
        if getattr(error, "sqlstate", None) != own_row.TORN_STATE:
            raise
        return None
    answered = _answered(request, _Found(*found), Place.NEW)
    return answered if isinstance(answered, Claimed) else None


def _with_row(database: Database, ref: RowRef) -> own_row.Statements:
    return own_row.statements(ref.declared, database.engine.dialect, _CLAIM, _COMPLETE)


def _claim_values(database: Database, request: ClaimRequest) -> dict[str, Any]:
    values: dict[str, Any] = {
        "key": request.keys[0],
        "owner": str(request.owner),
        "ttl_us": int(request.ttl_s * 1e6),
        "lock_timeout": str(milliseconds(database.lock_timeout_s)),
    }
    if request.work is None:
        return values
    return values | {
        "work": request.work,
        "task": request.task,
        "message": request.message.name,
        "retries": request.message.retries,
        "copy": request.message.copy,
        "max_crashes": request.max_crashes,
        # The user's own row tells for ever what was done.
        "may_create": request.may_create or request.row is not None,
        "fingerprint": request.fingerprint,
        "call": request.call,
    }


def _answered(
    request: ClaimRequest, found: _Found, place: Place | None = None
) -> ClaimAnswer | None:
    row = found if found.id is not None else None
    recorded = found.recorded_retries, found.recorded_copy
    decision = decide_row(request, row, recorded, found.now_us, place)
    if decision is Decision.AGAIN:
        return None  # the statement knows of the record alone
    if found.granted_fence is not None and found.claimed_attempts is not None:
        return Claimed(
            standing_claim(request, found.granted_fence),
            attempt=found.claimed_attempts,
            takeover=decision is Decision.TAKEOVER,
            crashes=found.claimed_crashes,
            progress_json=found.claimed_progress,
        )
    if found.granted_fence is not None or decision is Decision.BURY:
        return None
    if decision not in CLAIMABLE:
        return answer(request, row, decision, found.now_us)
    return _held(found, row)


def _claim_key(
    database: Database, request: ClaimRequest, values: dict[str, Any]
) -> ClaimAnswer | None:
    found = _FoundKey(*database.ask(_CLAIM_KEY, values)[0])
    if found.granted_fence is not None:
        return Claimed(standing_claim(request, found.granted_fence))
    return _held(found, None)


def _held(found: _Found | _FoundKey, row: _Found | None) -> ClaimAnswer | None:
    """The key is another's; None where it was not yet so in the statement's snapshot."""
    if found.held_until is None or found.held_until <= found.now_us:
        return None
    return busy_key(found.holder, found.held_until, row, found.now_us)


def begin(database: Database, engine: sa.Engine, *, idle_in_transaction_s: float) -> sa.Connection:
    """A connection of `engine` in a holder's transaction.

    A frozen holder's row locks end with its idle transaction, and a statement that runs for a
    client that is gone ends, too.
    """
    settings = _bounds(idle_in_transaction_s)
    if database.begins_itself:
        return database.begin(engine, settings)
    db = database.connect(engine)
    try:
        db.begin()
        database.read(db, database.once(_setting, *settings), _texts(settings))
    except BaseException:
        db.close()
        raise
    return db


def bound(
    database: Database, db: sa.Connection, claim: Claim, *, idle_in_transaction_s: float
) -> tuple[str, bool]:
    """The same bounds for a transaction that is open, by any driver.

    Its isolation level, and whether the claim is seen there.
    """
    settings = _bounds(idle_in_transaction_s)
    statement = database.once(_bounding, *settings)
    [row] = database.read(db, statement, _texts(settings) | claim_values(claim))
    return row.level.upper(), row.seen


def _bounding(database: Database, *names: str) -> Prepared:
    level = sa.func.current_setting("transaction_isolation").label("level")
    seen = sa.exists().where(of_claim()).label("seen")
    return Prepared(sa.select(level, seen, *_set_locally(names)), database.engine.dialect)


def _setting(database: Database, *names: str) -> Prepared:
    return Prepared(sa.select(*_set_locally(names)), database.engine.dialect)


def _bounds(idle_in_transaction_s: float) -> dict[str, Any]:
    return {
        "idle_in_transaction_session_timeout": milliseconds(idle_in_transaction_s),
        "client_connection_check_interval": _CHECK_CLIENT_MS,
        MARK: BEGUN,
    }


def _set_locally(names: Sequence[str]) -> list[sa.ColumnElement[str]]:
    return [sa.func.set_config(name, sa.bindparam(_bound(name)), True) for name in names]


def _texts(settings: dict[str, Any]) -> dict[str, str]:
    return {_bound(name): str(value) for name, value in settings.items()}


def _bound(name: str) -> str:
    return name.replace(".", "_")


def complete(claim: Claim, result_json: str | None, *, begun: bool) -> tuple[str, dict[str, Any]]:
    """The statement that completes; one row if it did.

    `begun`: in the holder's transaction, and in no later one; else alone.
    """
    values = {"key": claim.keys[0], "result": result_json, "begun": begun}
    return _COMPLETE, claim_values(claim) | values


def complete_with_row(
    database: Database, db: sa.Connection, claim: Claim, result_json: str | None
) -> tuple[bool, bool]:
    """The same with the user's own row: whether that was this claim's, and whether all was."""
    statements, values = _completing_row(database, claim, result_json, begun=True)
    own, finished = database.ask_in(db, statements.complete, values)[0]
    return bool(own), bool(finished)


def complete_alone(database: Database, claim: Claim, result_json: str | None) -> bool:
    """In one statement that commits by itself; False: nothing did, for whatever reason."""
    if claim.row is None:
        return bool(database.ask(*complete(claim, result_json, begun=False)))
    statements, values = _completing_row(database, claim, result_json, begun=False)
    try:
        _own, finished, _torn = database.ask(statements.complete_alone, values)[0]
    except database.engine.dialect.loaded_dbapi.Error:
        return False  # torn, or refused by what the row's owner made of it: a constraint, a trigger
    return bool(finished)


def _completing_row(
    database: Database, claim: Claim, result_json: str | None, *, begun: bool
) -> tuple[own_row.Statements, dict[str, Any]]:
    assert claim.row is not None  # noqa: S101
    _, values = complete(claim, result_json, begun=begun)
    values |= own_row.values(claim.row, database.engine.dialect)
    return _with_row(database, claim.row), values


def store_result(database: Database, claim: Claim, result_json: str) -> None:
    """Store the result of a work that this claim completed."""
    lock_timeout = str(milliseconds(database.lock_timeout_s))
    values = claim_values(claim) | {"result": result_json, "lock_timeout": lock_timeout}
    database.ask(_STORE_RESULT, values)


def renew(database: Database, holds: Sequence[LedgerHold]) -> list[str]:
    """Renew many claims, a thousand in a statement."""
    answers: list[str] = []
    for start in range(0, len(holds), _HOLDS_PER_STATEMENT):
        answers += _renew(database, holds[start : start + _HOLDS_PER_STATEMENT])
    return answers


def _renew(database: Database, holds: Sequence[LedgerHold]) -> list[str]:
    rows = [(hold, key, work) for hold in holds for key, work in _pairs(hold.claim)]
    found = database.ask(
        _RENEW,
        {
            "owners": [str(hold.claim.owner) for hold, _, _ in rows],
            "fences": [hold.claim.fence for hold, _, _ in rows],
            "works": [work for _, _, work in rows],
            "ttls_us": [int(hold.ttl_s * 1e6) for hold, _, _ in rows],
            "keys": [key for _, key, _ in rows],
            "lock_timeout": str(milliseconds(database.lock_timeout_s)),
        },
        renewal=True,
    )
    by_owner = {row.owner: row for row in map(_FoundHold._make, found)}
    return [_renewal(hold, by_owner[str(hold.claim.owner)]) for hold in holds]


def _pairs(claim: Claim) -> list[tuple[str, str | None]]:
    """Each of its keys, and each of its records, in as few pairs as have all of them."""
    keys, works = claim.keys, claim.works or (None,)
    number = max(len(keys), len(works))
    return [(keys[at % len(keys)], works[at % len(works)]) for at in range(number)]


def _renewal(hold: LedgerHold, row: _FoundHold) -> str:
    if row.renewed:
        return Renewal.RENEWED
    if row.state == State.DONE.value:
        return Renewal.SKIPPED  # by this very claim, a moment ago
    if hold.claim.work is not None and row.state != State.PROCESSING.value:
        return Renewal.TAKEN
    return Renewal.SKIPPED if row.standing else Renewal.TAKEN
