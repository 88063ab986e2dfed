"""One session of a database, and the locks that it holds.

Guarantees: until the session is lost, it holds in the server each lock that it records here. An
answer from another session loses it. Any other failure loses it too, because its locks are unknown
then. One thread at a time uses a session; see `provider.py`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from taskguard.errors import LedgerUnavailableError, LockServerUnavailableError
from taskguard.ledger.connections.database import Database
from taskguard.model.lease import Owner

__all__ = ["Name", "Opened", "Session"]

Name = int | str


class Opened(NamedTuple):
    """The facts that a new session reports.

    Attributes:
        number: the session's number in the server.
        own: whether the session belongs to this connection alone, without a pooler.
        replica: whether its server is read-only. Its primary can grant the same locks.
    """

    number: int
    own: bool
    replica: bool


class _Hold:
    """A lock, and the keys of its owner that have this name: usually one."""

    __slots__ = ("keys", "owner")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.keys: set[str] = set()


class Session(ABC):
    """One session. The constructor opens it.

    Attributes:
        opened: the facts that the session reported at its start.
        lasts_s: after how much idle time the server ends the session.
        is_lost: whether the session has ended. It holds no locks then.
    """

    def __init__(self, database: Database, *, answer_s: float) -> None:
        self.database = database
        self.is_lost = False
        self.lasts_s = self._wanted_s = 0.0
        self._answer_s = answer_s
        self._holds: dict[Name, _Hold] = {}
        self.connection = database.lone_connection()
        try:
            self.opened = self._open()
        except BaseException:
            self.close()
            raise

    # -- for each kind of database ------------------------------------------------------------

    @abstractmethod
    def name(self, key: str) -> Name:
        """Return the name of the key's lock in the database."""

    @abstractmethod
    def _open(self) -> Opened:
        """Read the facts about a new session."""

    @abstractmethod
    def _last(self, seconds: float) -> float:
        """Set the session's idle timeout; return the timeout that the server applies."""

    @abstractmethod
    def _take(self, names: Sequence[Name]) -> int:
        """Take the locks in this order, up to the first taken one; return how many it got."""

    @abstractmethod
    def _free(self, names: Sequence[Name]) -> int:
        """Free the locks; return how many of them the session held."""

    @abstractmethod
    def taken(self, names: Sequence[Name]) -> set[Name]:
        """Return the names that other sessions hold. This session holds none of them.

        Without names, the call only checks that the session is alive.
        """

    # -- locks --------------------------------------------------------------------------------

    def refuse_unfit(self) -> None:
        """Close and raise LockServerUnavailableError if the locks might not exclude others."""
        refused = _refused(self.opened)
        if refused is not None:
            self.close()
            raise LockServerUnavailableError(
                f"The locks in {self.database.place} cannot be used: {refused}"
            )

    def owner_of(self, name: Name) -> Owner | None:
        """Return the owner in this process that holds the lock."""
        hold = self._holds.get(name)
        return None if hold is None else hold.owner

    def take(self, keys: dict[str, Name], owner: Owner, *, ttl_s: float) -> Name | None:
        """Take all locks for the owner, or none; return the name that another session holds.

        The caller has checked that no other owner in this process holds one of them.
        """
        if ttl_s > self._wanted_s or not (self._holds or ttl_s == self._wanted_s):
            self.lasts_s, self._wanted_s = self._last(ttl_s), ttl_s
        # Sorted in every process, so that one of two competing processes gets all of its locks.
        new = sorted(set(keys.values()) - self._holds.keys())
        if new:
            got = self._take(new)
            if got < len(new):
                self._give_back(new[:got])
                return new[got]
        else:
            self.taken(())  # check that the session is alive
        for key, name in keys.items():
            self._holds.setdefault(name, _Hold(owner)).keys.add(key)
        return None

    def free(self, keys: Iterable[tuple[str, Name]], owner: Owner) -> bool:
        """Free the keys that the owner holds; return whether it held any."""
        mine = [(key, name) for key, name in keys if self.holds(key, name, owner)]
        gone = [name for key, name in mine if self._holds[name].keys == {key}]
        self._give_back(gone)
        for key, name in mine:
            self._holds[name].keys.discard(key)
        for name in gone:
            del self._holds[name]
        return bool(mine)

    def holds(self, key: str, name: Name, owner: Owner) -> bool:
        """Return whether the owner holds this key."""
        hold = self._holds.get(name)
        return hold is not None and hold.owner == owner and key in hold.keys

    def _give_back(self, names: Sequence[Name]) -> None:
        if names and self._free(names) < len(names):
            self.invalidate(None)
            raise LedgerUnavailableError("the session did not hold locks that it had been granted")

    # -- the connection -----------------------------------------------------------------------

    def _ask(self, statement: str, **values: Any) -> list[Any]:
        """Return the rows of a statement whose first column is the session's number."""
        rows = self.database.ask_alone(self, statement, values, longest_s=self._answer_s)
        if rows[0][0] != self.opened.number:
            self.invalidate(None)
            raise LedgerUnavailableError("another session answered")
        return rows

    def close(self) -> None:
        """Close the connection, which frees its locks."""
        self.invalidate(None)

    def invalidate(self, error: BaseException | None) -> None:
        """Record that the session is lost, and close its connection."""
        del error
        self.is_lost = True
        self._holds.clear()
        with contextlib.suppress(Exception):  # closed already
            self.connection.close()


def _refused(opened: Opened) -> str | None:
    if not opened.own:
        return (
            "a pooler is in front of the database, and the next client of its session would get "
            "the locks. Use a URL that bypasses the pooler, or keep the locks in a table "
            "(`taskguard locks create`)."
        )
    if opened.replica:
        return "it is a replica, and its primary does not know its locks. Use the primary's URL."
    return None
