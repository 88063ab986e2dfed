"""The ledger on taskguard's own tables, on PostgreSQL and SQLite, by SQLAlchemy Core.

Guarantees what `base.py` says. Every claim is decided by `states.decide()` from rows that are
locked for the moment; every later change is one conditional statement that names the old state,
the fence and the owner. Times are µs since 1970 by the database's clock.

Does not guarantee speed on SQLite: one writer at a time, so an open transaction stops the
renewals of others. For one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from taskguard.errors import (
    CommitUnknownError,
    LedgerSchemaError,
    LedgerUnavailableError,
    StaleTokenError,
    TransactionRetryError,
)
from taskguard.lease import Owner
from taskguard.ledger.base import (
    Answer,
    Busy,
    Claim,
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    LedgerHold,
    WorkView,
)
from taskguard.ledger.engine import make_engine
from taskguard.ledger.tables import KEYS, MESSAGES, METADATA, SCHEMA, SCHEMA_VERSION, WORKS
from taskguard.locks.base import Renewal
from taskguard.states import Decision, State, WorkRow, decide

__all__ = ["SqlLedger", "ddl"]

_T = TypeVar("_T")

_FREE = ""
_RENEWALS_PER_STATEMENT = 500
_PUBLISH_LOCK_S = 5.0
_RETRYABLE = ("40001", "40P01")
_LOCKED = "55P03"
_NO_TABLE = ("42P01", "no such table")


class LockTimeoutError(LedgerUnavailableError):
    """Another transaction holds the row."""


class SqlTransaction:
    """One open transaction of a holder."""

    def __init__(self, ledger: SqlLedger, db: sa.Connection) -> None:
        self._ledger = ledger
        self.db = db

    def complete(self, claim: Claim, result_json: str | None) -> None:
        self._ledger.complete_in(self.db, claim, result_json)

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        done = self.db.execute(
            sa.update(WORKS).where(_standing(claim)).values(progress=progress_json)
        )
        if done.rowcount != 1:
            raise _stale(claim)


class SqlLedger:
    """A `Ledger` on PostgreSQL or SQLite.

    Args:
        database: a SQLAlchemy URL, or an Engine of the user's own, whose settings stay as they
            are.
        lock_timeout_s: how long a claim waits for a row lock before that is busy.
        idle_in_transaction_s: PostgreSQL ends a guarded transaction that idles for so long, so
            that a frozen holder's row locks end.
        resolve_timeout_s: how long the outcome of an unanswered COMMIT is asked for.
    """

    def __init__(
        self,
        database: Any,
        *,
        lock_timeout_s: float = 0.25,
        idle_in_transaction_s: float = 60.0,
        resolve_timeout_s: float = 10.0,
    ) -> None:
        self._engine = make_engine(database, lock_timeout_s=lock_timeout_s)
        self._postgresql = self._engine.dialect.name == "postgresql"
        self._lock_timeout_s = lock_timeout_s
        self._idle_in_transaction_s = idle_in_transaction_s
        self._resolve_timeout_s = resolve_timeout_s

    def __repr__(self) -> str:
        return f"<SqlLedger {self._engine.url.render_as_string(hide_password=True)}>"

    # -- claims -------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one transaction, whether this delivery may run."""
        try:
            return self._twice(lambda: self._claim(request))
        except LockTimeoutError:
            return Busy(None, None, same_work=False, started=True)

    def _claim(self, request: ClaimRequest) -> ClaimAnswer:
        with self._transaction(lock_timeout_s=self._lock_timeout_s) as db:
            if request.work is not None:
                found = self._settled(db, request)
                if found is not None:
                    return found
            self._make_keys(db, request.keys)
            keys = self._lock_keys(db, request.keys)
            now_us = self._now_us(db)
            taken = [row for row in keys if row.owner != str(request.owner)]
            live = [row for row in taken if row.lease_until > now_us]
            row, copy = (None, 0)
            if request.work is not None:
                row, copy = self._read(db, request, lock=True)
            decision = self._decide(request, row, copy, now_us)
            if decision in (Decision.SAME, Decision.CREATE, Decision.CLAIM, Decision.TAKEOVER):
                if live:
                    return _busy_key(live, row, now_us)
                return self._grant(db, request, keys, row, decision, now_us)
            return self._refuse(db, request, row, decision, now_us)

    def _settled(self, db: sa.Connection, request: ClaimRequest) -> ClaimAnswer | None:
        """DONE, DEAD and the like touch no key."""
        row, copy = self._read(db, request, lock=False)
        now_us = self._now_us(db)
        decision = self._decide(request, row, copy, now_us)
        if decision in (Decision.SAME, Decision.CREATE, Decision.CLAIM, Decision.TAKEOVER):
            return None
        if decision is Decision.BURY:
            return None
        return self._refuse(db, request, row, decision, now_us)

    def _decide(self, request: ClaimRequest, row: Any, recorded_copy: int, now_us: int) -> Decision:
        if request.work is None:
            return Decision.CREATE
        return decide(
            None if row is None else _work_row(row),
            owner=str(request.owner),
            message=request.message.id,
            retries=request.message.retries,
            copy=request.message.copy,
            recorded_copy=recorded_copy,
            now_us=now_us,
            max_crashes=request.max_crashes,
            may_create=request.may_create,
        )

    def _grant(
        self,
        db: sa.Connection,
        request: ClaimRequest,
        keys: Sequence[Any],
        row: Any,
        decision: Decision,
        now_us: int,
    ) -> Claimed:
        owner = str(request.owner)
        if decision is Decision.SAME or (
            request.work is None and keys and all(each.owner == owner for each in keys)
        ):
            fence = keys[0].fence if keys else row.fence
        else:
            fence = max(now_us, *(each.fence + 1 for each in keys)) if keys else now_us
            until_us = now_us + int(request.ttl_s * 1e6)
            db.execute(
                sa.update(KEYS)
                .where(KEYS.c.key.in_(request.keys))
                .values(fence=fence, owner=owner, lease_until=until_us)
            )
            if request.work is not None:
                self._write_work(db, request, row, decision, fence, now_us, until_us)
        claim = Claim(request.keys, request.owner, fence, request.work, request.message)
        takeover = decision is Decision.TAKEOVER
        if row is None:
            return Claimed(claim)
        same = decision is Decision.SAME
        return Claimed(
            claim,
            attempt=row.attempts + (0 if same else 1),
            takeover=takeover,
            crashes=row.crashes + takeover,
            progress_json=row.progress,
        )

    def _write_work(  # noqa: PLR0917  # a row's worth of values
        self,
        db: sa.Connection,
        request: ClaimRequest,
        row: Any,
        decision: Decision,
        fence: int,
        now_us: int,
        until_us: int,
    ) -> None:
        values: dict[str, Any] = {
            "message": request.message.id,
            "retries": request.message.retries,
            "state": State.PROCESSING.value,
            "fence": fence,
            "owner": str(request.owner),
            "lease_until": until_us,
            "started": now_us,
            "error": None,
        }
        if row is None:
            db.execute(
                sa.insert(WORKS).values(
                    id=request.work,
                    task=request.task,
                    key=",".join(request.keys),
                    final=0,
                    attempts=1,
                    crashes=0,
                    crashed_owner="",
                    created=now_us,
                    **values,
                )
            )
            return
        if decision is Decision.TAKEOVER:
            values |= {"crashes": WORKS.c.crashes + 1, "crashed_owner": row.owner}
        changed = db.execute(
            sa.update(WORKS)
            .where(
                WORKS.c.id == request.work,
                WORKS.c.state == row.state,
                WORKS.c.fence == row.fence,
                WORKS.c.owner == row.owner,
            )
            .values(attempts=WORKS.c.attempts + 1, **values)
        )
        if changed.rowcount != 1:
            raise AssertionError("the row was locked, and changed")

    def _refuse(
        self, db: sa.Connection, request: ClaimRequest, row: Any, decision: Decision, now_us: int
    ) -> ClaimAnswer:
        if decision is Decision.BURY:
            db.execute(
                sa.update(WORKS)
                .where(
                    WORKS.c.id == request.work,
                    WORKS.c.state == State.PROCESSING.value,
                    WORKS.c.fence == row.fence,
                    WORKS.c.owner == row.owner,
                    WORKS.c.lease_until <= now_us,
                )
                .values(
                    state=State.DEAD.value, crashes=WORKS.c.crashes + 1, owner="", finished=now_us
                )
            )
            return Answer(State.DEAD, crashes=row.crashes + 1)
        if decision is Decision.BUSY:
            return Busy(
                Owner.parse(row.owner),
                (row.lease_until - now_us) / 1e6,
                same_work=True,
                started=True,
            )
        if decision is Decision.SUPERSEDED:
            return Answer(None, superseded=True)
        if decision is Decision.TOO_OLD:
            return Answer(None, too_old=True)
        return Answer(
            State(row.state),
            result_json=row.result,
            crashes=row.crashes,
            error=row.error,
            owner=Owner.parse(row.owner),
            same_message=row.message == request.message.id,
            age_s=max(0.0, (now_us - (row.finished or now_us)) / 1e6),
        )

    def look(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would find, without claiming."""

        def read() -> ClaimAnswer:
            with self._transaction() as db:
                row, copy = self._read(db, request, lock=False)
                now_us = self._now_us(db)
                decision = self._decide(request, row, copy, now_us)
                if decision in (
                    Decision.DONE,
                    Decision.DEAD,
                    Decision.REVOKED,
                    Decision.SUPERSEDED,
                    Decision.TOO_OLD,
                ):
                    return self._refuse(db, request, row, decision, now_us)
                busy = decision is Decision.BUSY
                return Busy(
                    Owner.parse(row.owner) if busy else None,
                    (row.lease_until - now_us) / 1e6 if busy else None,
                    same_work=busy,
                    started=row is not None and row.attempts > 0,
                )

        return self._twice(read)

    # -- the holder's transactions ------------------------------------------------------------

    @contextmanager
    def transaction(self, claim: Claim) -> Iterator[SqlTransaction]:
        """A transaction for the holder's writes; see `base.py`."""
        db = self._connect()
        try:
            with _translated(self._engine):
                db.begin()
                self._begin_guarded(db, claim)
            try:
                yield SqlTransaction(self, db)
            except BaseException as error:
                self._roll_back(db, claim, error)
                raise
            self._commit(db, claim)
        finally:
            db.close()

    def _begin_guarded(self, db: sa.Connection, claim: Claim) -> None:
        if self._postgresql:
            idle_ms = int(self._idle_in_transaction_s * 1000)
            db.exec_driver_sql(
                "select set_config('idle_in_transaction_session_timeout', %s, true),"
                " set_config('client_connection_check_interval', '2000', true)",
                (str(idle_ms),),
            )
        found = db.execute(sa.select(WORKS.c.id).where(_standing(claim))).first()
        if claim.work is not None and found is None:
            raise _stale(claim)

    def _roll_back(self, db: sa.Connection, claim: Claim, error: BaseException) -> None:
        """Nothing is written. What the database asked for decides how the body goes on."""
        broken = db.invalidated
        if not broken:
            try:
                db.rollback()
            except sa.exc.DBAPIError:
                broken = True
        if isinstance(error, sa.exc.DBAPIError):
            if broken or error.connection_invalidated:
                raise TransactionRetryError(
                    f"The connection broke in the guarded transaction of {_key(claim)}; nothing "
                    "was written.",
                    key=_key(claim),
                    fence=claim.fence,
                ) from error
            mapped = _map(error, self._engine)
            if isinstance(mapped, TransactionRetryError):
                raise mapped from error

    def _commit(self, db: sa.Connection, claim: Claim) -> None:
        try:
            db.commit()
        except sa.exc.DBAPIError as error:
            mapped = _map(error, self._engine)
            if isinstance(mapped, TransactionRetryError):
                raise mapped from error
            self._resolve(claim, error)

    def _resolve(self, claim: Claim, error: BaseException) -> None:
        """Learn what became of a COMMIT that got no answer."""
        until_s = time.monotonic() + self._resolve_timeout_s
        while True:
            try:
                with self._transaction(lock_timeout_s=self._resolve_timeout_s) as db:
                    select = sa.select(WORKS).where(WORKS.c.id == claim.work)
                    row = db.execute(select.with_for_update()).first()
                break
            except LedgerUnavailableError as unavailable:
                if time.monotonic() >= until_s:
                    raise CommitUnknownError(
                        f"COMMIT of {_key(claim)} got no answer and the database stays away.",
                        key=_key(claim),
                        fence=claim.fence,
                    ) from unavailable
                time.sleep(0.2)
        mine = row is not None and (row.fence, row.owner) == (claim.fence, str(claim.owner))
        if mine and row is not None and row.state == State.DONE.value:
            return
        if mine and row is not None and row.state == State.PROCESSING.value:
            raise TransactionRetryError(
                f"COMMIT of {_key(claim)} did not happen.", key=_key(claim), fence=claim.fence
            ) from error
        raise _stale(claim) from error

    def complete_in(self, db: sa.Connection, claim: Claim, result_json: str | None) -> None:
        """Keys first, in order; then the work: both still ours, or nothing."""
        with _translated(self._engine, pass_through=True):
            for key in claim.keys:
                ended = db.execute(
                    sa.update(KEYS)
                    .where(
                        KEYS.c.key == key,
                        KEYS.c.fence == claim.fence,
                        KEYS.c.owner == str(claim.owner),
                    )
                    .values(owner=_FREE, lease_until=0)
                )
                if ended.rowcount != 1:
                    raise _stale(claim)
            done = db.execute(
                sa.update(WORKS)
                .where(_standing(claim))
                .values(
                    state=State.DONE.value,
                    result=result_json,
                    lease_until=0,
                    finished=self._now(),
                )
            )
            if done.rowcount != 1:
                raise _stale(claim)

    def complete(self, claim: Claim, result_json: str | None) -> None:
        """PROCESSING -> DONE in a transaction of its own."""
        with self.transaction(claim) as tx:
            tx.complete(claim, result_json)

    # -- small changes ------------------------------------------------------------------------

    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of a work that this claim completed."""
        self._change(
            WORKS.c.id == claim.work,
            WORKS.c.state == State.DONE.value,
            WORKS.c.fence == claim.fence,
            WORKS.c.owner == str(claim.owner),
            result=result_json,
        )

    def fail(self, claim: Claim, error: str) -> bool:
        """PROCESSING -> FAILED; ends the lease."""
        return self._end(
            claim,
            state=State.FAILED.value,
            error=error.replace("\0", "\\0"),
            lease_until=0,
            finished=self._now(),
        )

    def give_back(self, claim: Claim) -> bool:
        """PROCESSING -> NEW; ends the lease."""
        return self._end(claim, state=State.NEW.value, owner=_FREE, lease_until=0)

    def _end(self, claim: Claim, **values: Any) -> bool:
        def end() -> bool:
            with self._transaction(lock_timeout_s=_PUBLISH_LOCK_S) as db:
                db.execute(
                    sa.update(KEYS)
                    .where(
                        KEYS.c.key.in_(claim.keys),
                        KEYS.c.fence == claim.fence,
                        KEYS.c.owner == str(claim.owner),
                    )
                    .values(owner=_FREE, lease_until=0)
                )
                if claim.work is None:
                    return True
                changed = db.execute(sa.update(WORKS).where(_standing(claim)).values(**values))
                return changed.rowcount == 1

        return self._twice(end)

    def report_in(self, claim: Claim) -> None:
        """Uncount this holder's crash, once."""
        self._change(
            WORKS.c.id == claim.work,
            WORKS.c.crashed_owner == str(claim.owner),
            WORKS.c.crashes > 0,
            WORKS.c.state != State.DEAD.value,
            crashes=WORKS.c.crashes - 1,
            crashed_owner="",
        )

    def revoke(self, work: str, *, message: str) -> bool:
        """NEW, PROCESSING or FAILED of this message -> FAILED, final."""
        changed = self._change(
            WORKS.c.id == work,
            WORKS.c.message == message,
            WORKS.c.state.in_([State.NEW.value, State.PROCESSING.value, State.FAILED.value]),
            state=State.FAILED.value,
            final=1,
            owner=_FREE,
            lease_until=0,
            error="revoked",
            finished=self._now(),
        )
        return changed == 1

    def _change(self, *where: Any, **values: Any) -> int:
        def change() -> int:
            with self._transaction(lock_timeout_s=_PUBLISH_LOCK_S) as db:
                return int(db.execute(sa.update(WORKS).where(*where).values(**values)).rowcount)

        return self._twice(change)

    # -- renewals -----------------------------------------------------------------------------

    def renew(self, holds: Sequence[LedgerHold]) -> list[str]:
        """Renew many claims; rows that somebody has locked are skipped."""
        answers: list[str] = []
        for start in range(0, len(holds), _RENEWALS_PER_STATEMENT):
            batch = holds[start : start + _RENEWALS_PER_STATEMENT]
            answers += self._twice(lambda batch=batch: self._renew(batch))  # type: ignore[misc]
        return answers

    def _renew(self, holds: Sequence[LedgerHold]) -> list[str]:
        ids = [hold.claim.work for hold in holds if hold.claim.work is not None]
        with self._transaction(lock_timeout_s=self._lock_timeout_s) as db:
            works = sa.select(WORKS.c.owner, WORKS.c.state).where(WORKS.c.id.in_(ids))
            keys = sa.select(KEYS.c.key, KEYS.c.owner, KEYS.c.fence).where(
                KEYS.c.key.in_({key for hold in holds for key in hold.claim.keys})
            )
            states = {row.owner: row.state for row in db.execute(works)}
            holders = {row.key: (row.owner, row.fence) for row in db.execute(keys)}
            locked = keys.order_by(KEYS.c.key)
            if self._postgresql:
                locked = locked.with_for_update(skip_locked=True)
            free = {row.key for row in db.execute(locked)}
            now_us = self._now_us(db)
            return [self._renew_one(db, hold, states, holders, free, now_us) for hold in holds]

    def _renew_one(
        self,
        db: sa.Connection,
        hold: LedgerHold,
        states: dict[str, str],
        holders: dict[str, tuple[str, int]],
        free: set[str],
        now_us: int,
    ) -> str:
        claim = hold.claim
        owner = str(claim.owner)
        state = states.get(owner)
        if state == State.DONE.value:
            return Renewal.SKIPPED  # by this very claim, a moment ago
        if claim.work is not None and state != State.PROCESSING.value:
            return Renewal.TAKEN
        if any(holders.get(key) != (owner, claim.fence) for key in claim.keys):
            return Renewal.TAKEN
        if not free.issuperset(claim.keys):
            return Renewal.SKIPPED
        until_us = now_us + int(hold.ttl_s * 1e6)
        db.execute(
            sa.update(KEYS)
            .where(KEYS.c.key.in_(claim.keys), KEYS.c.owner == owner)
            .values(lease_until=until_us)
        )
        if claim.work is not None:
            db.execute(sa.update(WORKS).where(_standing(claim)).values(lease_until=until_us))
        return Renewal.RENEWED

    # -- deferrals ----------------------------------------------------------------------------

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Publish the next copy under the message's row lock, then commit its number."""
        copy = request.message.copy + 1
        insert = postgresql.insert if self._postgresql else sqlite.insert
        with self._transaction(lock_timeout_s=_PUBLISH_LOCK_S) as db:
            now_us = self._now_us(db)
            statement: Any = insert(MESSAGES).values(
                message=request.message.id, work=request.work, copy=copy, updated=now_us
            )
            statement = statement.on_conflict_do_update(
                index_elements=[MESSAGES.c.message],
                set_={"copy": copy, "updated": now_us},
                where=MESSAGES.c.copy < copy,
            ).returning(MESSAGES.c.copy)
            if db.execute(statement).first() is None:
                return False
            publish(copy)
            return True

    # -- for people ---------------------------------------------------------------------------

    def view(self, work: str) -> WorkView | None:
        """A work's record."""

        def read() -> Any:
            with self._transaction() as db:
                return db.execute(sa.select(WORKS).where(WORKS.c.id == work)).first()

        row = self._twice(read)
        if row is None:
            return None
        return WorkView(
            id=row.id,
            task=row.task,
            key=row.key,
            message=row.message,
            retries=row.retries,
            state=State(row.state),
            final=bool(row.final),
            fence=row.fence,
            owner=row.owner,
            lease_until_s=row.lease_until / 1e6,
            attempts=row.attempts,
            crashes=row.crashes,
            progress_json=row.progress,
            result_json=row.result,
            error=row.error,
            created_s=_seconds(row.created),
            started_s=_seconds(row.started),
            finished_s=_seconds(row.finished),
        )

    def check_schema(self) -> None:
        """Raise LedgerSchemaError unless the tables are there in this library's version."""
        with self._transaction() as db:
            version = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
        if version != SCHEMA_VERSION:
            raise LedgerSchemaError(
                f"The ledger's tables have version {version}, this library wants "
                f"{SCHEMA_VERSION}. Run `taskguard ledger create`."
            )

    def create_schema(self) -> None:
        """Create what is missing; asked again it does nothing."""
        with self._transaction() as db:
            if self._postgresql:
                # Two at once would both find no table and one would fail.
                db.exec_driver_sql("select pg_advisory_xact_lock(7310114027)")
            METADATA.create_all(db)
            if db.execute(sa.select(SCHEMA.c.version)).first() is None:
                db.execute(sa.insert(SCHEMA).values(version=SCHEMA_VERSION))

    def close(self) -> None:
        """Close idle connections."""
        self._engine.dispose()

    # -- connections --------------------------------------------------------------------------

    def _connect(self) -> sa.Connection:
        with _translated(self._engine):
            return self._engine.connect()

    @contextmanager
    def _transaction(self, *, lock_timeout_s: float | None = None) -> Iterator[sa.Connection]:
        with _translated(self._engine), self._engine.begin() as db:
            if self._postgresql and lock_timeout_s is not None:
                db.exec_driver_sql(
                    "select set_config('lock_timeout', %s, true)", (f"{lock_timeout_s * 1000:.0f}",)
                )
            yield db

    def _twice(self, ask: Callable[[], _T]) -> _T:
        """After a restart of the server the pool holds dead connections: once more, then no."""
        try:
            return ask()
        except LockTimeoutError:
            raise
        except LedgerUnavailableError:
            return ask()

    def _now(self) -> Any:
        """The database's clock, as an expression."""
        if self._postgresql:
            return sa.cast(
                sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger
            )
        return sa.literal(time.time_ns() // 1000, sa.BigInteger)

    def _now_us(self, db: sa.Connection) -> int:
        if self._postgresql:
            return int(db.execute(sa.select(self._now())).scalar_one())
        return time.time_ns() // 1000

    def _make_keys(self, db: sa.Connection, keys: tuple[str, ...]) -> None:
        insert = postgresql.insert if self._postgresql else sqlite.insert
        for key in keys:
            statement: Any = insert(KEYS).values(key=key, fence=0, owner=_FREE, lease_until=0)
            db.execute(statement.on_conflict_do_nothing())

    def _lock_keys(self, db: sa.Connection, keys: tuple[str, ...]) -> Sequence[Any]:
        select = sa.select(KEYS).where(KEYS.c.key.in_(keys)).order_by(KEYS.c.key)
        return db.execute(select.with_for_update()).all()

    def _read(self, db: sa.Connection, request: ClaimRequest, *, lock: bool) -> tuple[Any, int]:
        select = sa.select(WORKS).where(WORKS.c.id == request.work)
        row = db.execute(select.with_for_update() if lock else select).first()
        copies = sa.select(MESSAGES.c.copy).where(MESSAGES.c.message == request.message.id)
        return row, db.execute(copies).scalar() or 0


def _work_row(row: Any) -> WorkRow:
    return WorkRow(
        state=State(row.state),
        final=bool(row.final),
        owner=row.owner,
        fence=row.fence,
        lease_until_us=row.lease_until,
        message=row.message,
        retries=row.retries,
        crashes=row.crashes,
    )


def _busy_key(live: Sequence[Any], row: Any, now_us: int) -> Busy:
    last = max(live, key=lambda each: each.lease_until)
    return Busy(
        Owner.parse(last.owner),
        (last.lease_until - now_us) / 1e6,
        same_work=False,
        started=row is not None and row.attempts > 0,
    )


def _standing(claim: Claim) -> Any:
    """The work is still this claim's."""
    return sa.and_(
        WORKS.c.id == claim.work,
        WORKS.c.state == State.PROCESSING.value,
        WORKS.c.fence == claim.fence,
        WORKS.c.owner == str(claim.owner),
    )


def _key(claim: Claim) -> str:
    return ", ".join(claim.keys)


def _stale(claim: Claim) -> StaleTokenError:
    return StaleTokenError(
        f"The database refused to commit {_key(claim)} with fence {claim.fence}: a newer holder "
        "exists. Nothing was written.",
        key=_key(claim),
        fence=claim.fence,
    )


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6


@contextmanager
def _translated(engine: sa.Engine, *, pass_through: bool = False) -> Iterator[None]:
    try:
        yield
    except sa.exc.DBAPIError as error:
        if pass_through:
            raise
        mapped = _map(error, engine)
        if mapped is None:
            raise
        raise mapped from error
    except sa.exc.TimeoutError as error:
        raise LedgerUnavailableError(f"No connection to {_place(engine)}: {error}") from error


def _place(engine: sa.Engine) -> str:
    url = engine.url
    return f"{url.drivername} {url.host or ''}/{url.database or ''}"


def _map(error: sa.exc.DBAPIError, engine: sa.Engine) -> Exception | None:
    code = getattr(error.orig, "sqlstate", None)
    text = str(error.orig)
    if code in _RETRYABLE:
        return TransactionRetryError(f"The database asked to run it again: {text}")
    if code == _LOCKED or "database is locked" in text:
        return LockTimeoutError("Another transaction holds the row.")
    if code == _NO_TABLE[0] or _NO_TABLE[1] in text:
        return LedgerSchemaError(
            f"The ledger's tables do not exist in {_place(engine)}. Run `taskguard ledger create`."
        )
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or (
        error.connection_invalidated
    ):
        kind = type(error.orig).__name__
        return LedgerUnavailableError(f"The database {_place(engine)} gave no answer ({kind}).")
    return None


def ddl(url: str) -> str:
    """The SQL that `create_schema` would run, for a review or a migration."""
    dialect = sa.make_url(url).get_dialect()()
    tables = [
        str(sa.schema.CreateTable(each).compile(dialect=dialect)).strip()
        for each in METADATA.sorted_tables
    ]
    version = str(
        sa.insert(SCHEMA)
        .values(version=SCHEMA_VERSION)
        .compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    )
    return "".join(f"{each};\n\n" for each in (*tables, version))
