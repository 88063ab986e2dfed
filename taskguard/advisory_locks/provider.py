"""`AdvisoryLocks`: owners within the process, retries and waiting.

The package's docstring has its guarantees.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from taskguard.advisory_locks.mysql import MySQLSession
from taskguard.advisory_locks.postgresql import PostgreSQLSession
from taskguard.advisory_locks.session import Session
from taskguard.errors import ConfigurationError
from taskguard.findings import Finding
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.engine import read_url
from taskguard.lock_table.answers import Answers
from taskguard.lock_table.looking import WAIT_SLICE_S, look_until
from taskguard.locks.base import NOBODY, Granted, Held, Hold, Holder, Renewal, Traits
from taskguard.model.lease import Owner, new_owner
from taskguard.model.policy import DAY_S, check_number
from taskguard.native import greenlets

__all__ = ["AdvisoryLocks"]

_T = TypeVar("_T")

_MIN_TTL_S = 1.0
# For each kind of database: its driver and its session.
_KINDS: dict[str, tuple[str, type[Session]]] = {
    "postgresql": ("psycopg", PostgreSQLSession),
    "mariadb": ("pymysql", MySQLSession),
    "mysql": ("pymysql", MySQLSession),
}


class AdvisoryLocks:
    """A `LockProvider` on advisory locks of PostgreSQL, or GET_LOCK of MariaDB or MySQL.

    Args:
        database: a SQLAlchemy URL with postgresql+advisory://, mariadb+advisory:// or
            mysql+advisory://; or an Engine of the user's own.
        answer_s: how many seconds one answer may take.
    """

    def __init__(self, database: Any, *, answer_s: float = 2.0) -> None:
        check_number("answer_s", answer_s, at_least=0.001, at_most=DAY_S)
        if (kind := greenlets()) is not None:
            raise ConfigurationError(
                f"Advisory locks do not work with {kind}: one session holds all locks of a "
                "process, and needs real threads. Keep the locks in a table (`taskguard locks "
                "create`), or use a pool of processes or threads."
            )
        if not isinstance(database, sa.Engine):
            database = _url(database)
        self._open = _opener(database)
        connect_s = max(2, math.ceil(answer_s))  # libpq takes no less
        self._database = Database(database, lock_timeout_s=answer_s, connect_timeout_s=connect_s)
        self._answers = Answers(self._database, answer_s=answer_s)
        self._answer_s = answer_s
        self._parents: list[Session | None] = []
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._current: Session | None = None

    def __repr__(self) -> str:
        return f"<AdvisoryLocks {self._database.place}>"

    @property
    def traits(self) -> Traits:
        """Locks of a session, without tokens. Other processes cannot read their owners."""
        return Traits(
            session=True,
            tokens=False,
            owners=False,
            min_ttl_s=_MIN_TTL_S,
            failover_s=self._database.failover_s,
            in_database=True,
        )

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none: one round trip, or two if one of several keys is taken."""
        del with_fence, wait_s  # no tokens; waiters poll

        ttl_s = max(ttl_s, _MIN_TTL_S)

        def take(session: Session) -> Granted | Held:
            names = {key: session.name(key) for key in keys}
            for key, name in names.items():
                holder = session.owner_of(name)
                if holder is not None and holder != owner:
                    return Held(key, holder, session.lasts_s)
            taken = session.take(names, owner, ttl_s=ttl_s)
            if taken is None:
                return Granted(0, session.lasts_s)
            key = next(key for key, name in names.items() if name == taken)
            return Held(key, NOBODY, ttl_s)

        return self._ask(take)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that the owner still holds, in at most one round trip.

        Return False if it held none. Return True if the call lost the session, which frees them.
        """
        lost: list[None] = []

        def free(session: Session) -> bool:
            return session.free([(key, session.name(key)) for key in keys], owner)

        return self._ask(free, on_retry=lambda: lost.append(None)) or bool(lost)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Free the keys that `owner` still holds. Their true owner takes them at its renewal.

        Return False, because the keys have no owner then.
        """
        del to, ttl_s
        self.release(keys, owner)
        return False

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Check that the session is alive, and which missing locks others hold: one round trip."""
        if not holds:
            return []

        def renew(session: Session) -> list[str]:
            names = [[(key, session.name(key)) for key in hold.keys] for hold in holds]
            missing = {
                name for several in names for _, name in several if session.owner_of(name) is None
            }
            taken = session.taken(list(missing))
            answers = []
            for hold, several in zip(holds, names, strict=True):
                if all(session.holds(key, name, hold.owner) for key, name in several):
                    answers.append(Renewal.RENEWED)
                elif any(
                    name in taken or session.owner_of(name) not in (None, hold.owner)
                    for _, name in several
                ):
                    answers.append(Renewal.TAKEN)
                else:
                    answers.append(Renewal.GONE)
            return answers

        return self._ask(renew)

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key may have been released, or for a second. Then try to acquire it."""
        del owner

        def is_free(session: Session) -> bool:
            name = session.name(key)
            return session.owner_of(name) is None and not session.taken([name])

        if timeout_s > 0:
            ends_s = time.monotonic() + min(timeout_s, WAIT_SLICE_S)
            look_until(lambda: self._ask(is_free), ends_s=ends_s)

    def holders(self, key: str) -> list[Holder]:
        """Return the holder of a key; its owner is NOBODY if another session holds the key."""

        def see(session: Session) -> list[Holder]:
            name = session.name(key)
            owner = session.owner_of(name)
            if owner is None and not session.taken([name]):
                return []
            return [Holder(key, owner or NOBODY, 0, session.lasts_s)]

        return self._ask(see)

    def check(self) -> list[Finding]:
        """Return what is wrong with the database or the connection. It tries a lock of its own."""
        return self._answers.of(self._check)

    def close(self) -> None:
        """End the session, which frees its locks."""
        self._after_fork()
        with self._mutex:
            session, self._current = self._current, None
            if session is not None:
                session.close()
        self._database.close()

    def _check(self) -> list[Finding]:
        from taskguard.advisory_locks import health  # not for deliveries

        session = self._open(self._database, answer_s=self._answer_s)
        with contextlib.closing(session):
            found = health.check(session)
            if not found:
                owner = new_owner()
                key = f"check:{owner.nonce}"
                session.take({key: session.name(key)}, owner, ttl_s=_MIN_TTL_S)
            return found

    # -- the session --------------------------------------------------------------------------

    def _ask(
        self, ask: Callable[[Session], _T], *, on_retry: Callable[[], None] = lambda: None
    ) -> _T:
        """Run `ask` with the session, or with a new one if the session is lost."""
        self._after_fork()

        def asked() -> _T:
            with self._mutex:
                return self._asked(ask)

        return self._answers.of(asked, on_retry=on_retry)

    def _asked(self, ask: Callable[[Session], _T]) -> _T:
        session = self._current
        if session is None or session.is_lost:
            session = self._current = self._open(self._database, answer_s=self._answer_s)
        try:
            session.refuse_unfit()
            return ask(session)
        except BaseException:
            # The call was interrupted or failed halfway, so the session's locks are unknown.
            session.close()
            raise

    def _after_fork(self) -> None:
        """Start a new session in a forked process.

        Keep a reference to the parent's session: garbage collection would close its connection.
        """
        if self._pid != os.getpid():
            self._parents.append(self._current)
            self._begin_anew()


def _url(given: Any) -> sa.URL:
    url = read_url(given)
    driver, _ = _KINDS.get(url.get_backend_name(), ("", None))
    named = url.drivername.partition("+")[2] == "advisory"
    return url.set(drivername=f"{url.get_backend_name()}+{driver}") if named and driver else url


def _opener(database: sa.URL | sa.Engine) -> type[Session]:
    url = database.url if isinstance(database, sa.Engine) else database
    kind = url.get_backend_name()
    if kind not in _KINDS:
        raise ConfigurationError(
            f"taskguard has no advisory locks for {kind}. Use PostgreSQL, MariaDB or MySQL."
        )
    driver, opener = _KINDS[kind]
    if url.get_driver_name() != driver:
        raise ConfigurationError(
            f"Advisory locks on {kind} need {driver}, not {url.get_driver_name()}: write "
            f"{kind}+advisory:// in their URL."
        )
    return opener
