"""`TableLocks`: converts keys and times for the database, renews in batches, and waits.

Guarantees: every failure is raised as LockServerUnavailableError, which says what to do and never
contains a password. A call ends within a few seconds even if the database is frozen. If the
database has no LISTEN, waiters poll.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from typing import Any

from taskguard.errors import ConfigurationError
from taskguard.findings import Finding
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.engine import read_url
from taskguard.lock_table import table
from taskguard.lock_table.answers import Answers
from taskguard.lock_table.listener import Listener
from taskguard.lock_table.looking import WAIT_SLICE_S, longer_pauses_s, look_until
from taskguard.lock_table.mysql import MySQLSteps
from taskguard.lock_table.postgresql import PostgreSQLSteps
from taskguard.lock_table.steps import Steps, shares_in
from taskguard.locks.base import Granted, Held, Hold, Holder, Renewal, Traits, in_batches
from taskguard.model.lease import Owner
from taskguard.model.policy import DAY_S, check_number

__all__ = ["TableLocks"]

logger = logging.getLogger("taskguard")

# How long `wanted_until` lasts: longer than WAIT_SLICE_S, so that a slow caller can try again.
_WANTED_US = 3_000_000
_KEYS_PER_RENEWAL = 1_000
_DAY_US = 86_400_000_000
# One of this many releases checks whether old rows are due for deletion.
_RELEASES_PER_LOOK = 200
_FORGET_EVERY_US = 600_000_000
_MOST_FORGOTTEN = 10_000
_RENEWALS = {
    "R": Renewal.RENEWED,
    "G": Renewal.GONE,
    "T": Renewal.TAKEN,
    "S": Renewal.SKIPPED,
}


class TableLocks:
    """A `LockProvider` in the table `taskguard_locks` of a PostgreSQL, MariaDB or MySQL.

    Args:
        database: a SQLAlchemy URL, an Engine of the user's own, or the ledger's `Database`.
        answer_s: how many seconds one answer may take.
    """

    def __init__(self, database: Any, *, answer_s: float = 2.0) -> None:
        check_number("answer_s", answer_s, at_least=0.001, at_most=DAY_S)
        self._owns_database = not isinstance(database, Database)
        if isinstance(database, str):
            table.refuse_other_kinds(read_url(database).get_backend_name())
        if self._owns_database:
            connect_s = max(2, math.ceil(answer_s))  # libpq takes no less
            database = Database(database, lock_timeout_s=answer_s, connect_timeout_s=connect_s)
        self._database: Database = database
        self._answers = Answers(database, answer_s=answer_s)
        kind = database.engine.dialect.name
        table.refuse_other_kinds(kind)
        self._listener: Listener | None = None
        self._steps: Steps
        if kind == "postgresql":
            self._steps = PostgreSQLSteps(database, answer_s=answer_s)
            self._listener = Listener(database)
        else:
            self._steps = MySQLSteps(database, answer_s=answer_s)

    @classmethod
    def beside(cls, ledger: Any) -> TableLocks:
        """Return locks in a ledger's database, which use the ledger's connections."""
        database = getattr(ledger, "database", None)
        if not isinstance(database, Database):
            raise ConfigurationError(
                "locks=ledger:// needs a ledger with a database, and none is set. Set a ledger, or "
                "write the database's URL instead of ledger://."
            )
        return cls(database)

    def __repr__(self) -> str:
        return f"<TableLocks {self._database.place}>"

    @property
    def place(self) -> str:
        """Host, port and name of the database."""
        return self._database.place

    @property
    def traits(self) -> Traits:
        """Leases with tokens; keys can be shared."""
        return Traits(shares=True, in_database=True, failover_s=self._database.failover_s)

    def acquire(
        self,
        keys: tuple[str, ...],
        owner: Owner,
        *,
        ttl_s: float,
        with_fence: bool,
        wait_s: float,
        limit: int = 1,
    ) -> Granted | Held:
        """Take all keys or none, or a share of one."""
        names, me = {_text(key): key for key in keys}, _text(str(owner))
        waits_us = _WANTED_US if wait_s > 0 and self._listener is not None else 0
        if limit == 1:
            found = self._answers.of(
                lambda: self._steps.take(
                    list(names), me, ttl_us=_us(ttl_s), fenced=with_fence, waits_us=waits_us
                )
            )
        else:
            [name] = names
            found = self._answers.of(
                lambda: self._steps.share(
                    name,
                    me,
                    ttl_us=_us(ttl_s),
                    fenced=with_fence,
                    waits_us=waits_us,
                    most=limit,
                )
            )
        if found.taken is None:
            return Granted((found.token or 0) if with_fence else 0, ttl_s)
        holder = found.holder or ""
        shares = shares_in(holder)
        return Held(
            key=names[found.taken],
            owner=Owner.parse(_read(max(shares, key=lambda each: shares[each], default=holder))),
            remaining_s=(found.left_us or 0) / 1e6,
            shared=bool(shares),
        )

    def release(self, keys: tuple[str, ...], owner: Owner, *, limit: int = 1) -> bool:
        """Free the keys that the owner still holds, and wake their waiters.

        Return False if it held none. Return True if a first attempt got no answer, because that
        attempt may have freed them.
        """
        again: list[None] = []
        names, me = _texts(keys), _text(str(owner))

        def free() -> int:
            return self._steps.free(names, me) if limit == 1 else self._steps.unshare(names[0], me)

        freed = self._answers.of(free, on_retry=lambda: again.append(None))
        if random.randrange(_RELEASES_PER_LOOK) == 0:  # noqa: S311 - no secret
            self._forget_in_passing()
        return bool(freed or again)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that are still `owner`'s over to their true owner for `ttl_s`."""
        names, finder, true = _texts(keys), _text(str(owner)), _text(str(to))
        return bool(
            self._answers.of(
                lambda: self._steps.hand_over(names, finder, to=true, ttl_us=_us(ttl_s))
            )
        )

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases: 1,000 keys in a statement, and shares in statements of their own.

        If another transaction has locked a row, usually for a moment only, its lease is tried a
        second time, and is then SKIPPED. If a batch gets no answer, the call raises; the leases of
        earlier batches are renewed nevertheless.
        """
        shares = [at for at, hold in enumerate(holds) if hold.limit != 1]
        if shares and len(shares) < len(holds):
            alone = [at for at, hold in enumerate(holds) if hold.limit == 1]
            found: dict[int, str] = {}
            for part in (alone, shares):
                found |= dict(zip(part, self.renew([holds[at] for at in part]), strict=True))
            return [found[at] for at in range(len(holds))]
        answers = self._renew(holds)
        skipped = [at for at, answer in enumerate(answers) if answer == Renewal.SKIPPED]
        if skipped:
            again = self._renew([holds[at] for at in skipped])
            for at, answer in zip(skipped, again, strict=True):
                answers[at] = answer
        return answers

    def _renew(self, holds: Sequence[Hold]) -> list[str]:
        answers: list[str] = []
        for batch in in_batches(holds, most_keys=_KEYS_PER_RENEWAL):
            asked = [(_texts(each.keys), _text(str(each.owner)), _us(each.ttl_s)) for each in batch]
            if batch[0].limit == 1:
                letters = self._answers.of(lambda asked=asked: self._steps.renew(asked))  # type: ignore[misc]
            else:
                shares = [(names[0], owner, ttl_us) for names, owner, ttl_us in asked]
                letters = self._answers.of(lambda shares=shares: self._steps.renew_shares(shares))  # type: ignore[misc]
            answers += [_RENEWALS[letter] for letter in letters]
        return answers

    def wait(self, key: str, owner: Owner, *, timeout_s: float, limit: int = 1) -> None:
        """Block until the key may have been released, or for a second. Then try to acquire it."""
        del owner
        if timeout_s <= 0:
            return
        name, ends_s = _text(key), time.monotonic() + min(timeout_s, WAIT_SLICE_S)

        def has_room() -> bool:
            return self._answers.of(lambda: self._steps.has_room(name, most=limit))

        if self._listener is None:
            look_until(has_room, ends_s=ends_s)
            return
        with self._listener.waiting(name) as woken:
            pauses_s = longer_pauses_s()
            while True:
                # Read `hears` before the check: the check sees an earlier release, and the
                # listener hears a later one.
                hears = woken.hears
                left_s = ends_s - time.monotonic()
                if has_room() or left_s <= 0:
                    return
                if woken.wait(left_s if hears else min(next(pauses_s), left_s)):
                    return

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key, read by one statement."""
        row = self._answers.of(lambda: self._steps.see(_text(key)))
        if row is None:
            return []
        return [
            Holder(key, Owner.parse(_read(owner)), row.fence, left_us / 1e6, shared=row.is_shared)
            for owner, left_us in row.holders.items()
        ]

    def check(self) -> list[Finding]:
        """Return what is wrong with the table and its database."""
        from taskguard.lock_table import health  # not for deliveries

        return self._answers.of(lambda: health.check(self._database))

    def close(self) -> None:
        """Close idle connections, except those of a ledger, which the ledger closes."""
        if self._listener is not None:
            self._listener.close()
        if self._owns_database:
            self._database.close()

    # -- the table itself ---------------------------------------------------------------------

    def create_table(self, *, unlogged: bool = False) -> None:
        """Create the table and its functions if they are missing.

        Args:
            unlogged: create an UNLOGGED table on PostgreSQL. Commits do not wait for the disk, and
                a crash of the server empties the table. Recommended with a ledger.
        """
        table.make(self._database, unlogged=unlogged)

    def forget(self, *, older_than_s: float = 86_400.0) -> int:
        """Delete rows whose lease and token are older than this; return how many."""
        check_number("older_than_s", older_than_s, at_least=3_600.0)
        gone = 0
        while True:
            last = self._answers.of(
                lambda: self._steps.forget(
                    older_us=_us(older_than_s), every_us=0, most=_MOST_FORGOTTEN
                )
            )
            gone += last
            if last < _MOST_FORGOTTEN:
                return gone

    def _forget_in_passing(self) -> None:
        try:
            self._steps.forget(older_us=_DAY_US, every_us=_FORGET_EVERY_US, most=_MOST_FORGOTTEN)
        except Exception as error:  # noqa: BLE001  # the lock is released already
            logger.debug("%r: old rows were not deleted: %s. It tries again later.", self, error)


def _text(text: str) -> str:
    """Return the text in ASCII, as the table stores it. ASCII stays as it is."""
    return text.encode("unicode_escape").decode("ascii")


def _texts(keys: Sequence[str]) -> list[str]:
    return sorted(map(_text, keys))


def _read(text: str) -> str:
    """Return the text that `_text()` encoded. Tolerate values that taskguard did not write."""
    return text.encode("ascii", "replace").decode("unicode_escape", "replace")


def _us(seconds: float) -> int:
    return max(1, int(seconds * 1e6))
