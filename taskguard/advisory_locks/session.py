"""One session of a database, and the locks that it holds.

Guarantees: what it says that it holds, it holds in the server, until it is lost; each answer is of
the session that was opened, or the session is lost. Whatever else goes wrong in a question loses
it, too: nobody knows what it holds then. One thread at a time asks; see `provider.py`.
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
    """What a new session says of itself.

    Attributes:
        number: the server's number of it.
        own: it is this connection's alone: no pooler is between.
        replica: its server takes no changes, and another one may grant the same.
    """

    number: int
    own: bool
    replica: bool


class _Hold:
    """A lock, and the keys of its owner that have this name: as a rule one."""

    __slots__ = ("keys", "owner")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.keys: set[str] = set()


class Session(ABC):
    """It is opened by being made.

    Attributes:
        opened: what it said of itself.
        lasts_s: for how long the server keeps it when it hears nothing.
        is_lost: it holds nothing any more.
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

    # -- what a kind of database is asked -----------------------------------------------------

    @abstractmethod
    def name(self, key: str) -> Name:
        """What the database calls the lock of this key."""

    @abstractmethod
    def _open(self) -> Opened:
        """The first question."""

    @abstractmethod
    def _last(self, seconds: float) -> float:
        """Have the server keep it for so long when it hears nothing; for how long that is."""

    @abstractmethod
    def _take(self, names: Sequence[Name]) -> int:
        """Take them, one after the other, up to the first that is another's; how many those are."""

    @abstractmethod
    def _free(self, names: Sequence[Name]) -> int:
        """Give them back; how many of them it had."""

    @abstractmethod
    def taken(self, names: Sequence[Name]) -> set[Name]:
        """Which of these, that it does not hold, somebody holds. An answer also without names."""

    # -- locks --------------------------------------------------------------------------------

    def refuse_unfit(self) -> None:
        """Raise LockServerUnavailableError, and end, if its locks would exclude nobody for sure."""
        refused = _refused(self.opened)
        if refused is not None:
            self.close()
            raise LockServerUnavailableError(
                f"The locks in {self.database.place} cannot be used: {refused}"
            )

    def owner_of(self, name: Name) -> Owner | None:
        """Who in this process holds it."""
        hold = self._holds.get(name)
        return None if hold is None else hold.owner

    def take(self, keys: dict[str, Name], owner: Owner, *, ttl_s: float) -> Name | None:
        """All of them for the owner, or none; None, or the name that another session holds.

        None of them is another owner's in this process.
        """
        if ttl_s > self._wanted_s or not (self._holds or ttl_s == self._wanted_s):
            self.lasts_s, self._wanted_s = self._last(ttl_s), ttl_s
        # In one order for everybody: who is refused waits for somebody who goes on.
        new = sorted(set(keys.values()) - self._holds.keys())
        if new:
            got = self._take(new)
            if got < len(new):
                self._give_back(new[:got])
                return new[got]
        else:
            self.taken(())  # is it still there?
        for key, name in keys.items():
            self._holds.setdefault(name, _Hold(owner)).keys.add(key)
        return None

    def free(self, keys: Iterable[tuple[str, Name]], owner: Owner) -> bool:
        """Those of them that are the owner's are free; whether there were any."""
        mine = [(key, name) for key, name in keys if self.holds(key, name, owner)]
        gone = [name for key, name in mine if self._holds[name].keys == {key}]
        self._give_back(gone)
        for key, name in mine:
            self._holds[name].keys.discard(key)
        for name in gone:
            del self._holds[name]
        return bool(mine)

    def holds(self, key: str, name: Name, owner: Owner) -> bool:
        """Whether the owner has this key."""
        hold = self._holds.get(name)
        return hold is not None and hold.owner == owner and key in hold.keys

    def _give_back(self, names: Sequence[Name]) -> None:
        if names and self._free(names) < len(names):
            self.invalidate(None)
            raise LedgerUnavailableError("It had not the locks that it was given")

    # -- the connection -----------------------------------------------------------------------

    def _ask(self, statement: str, **values: Any) -> list[Any]:
        """The rows of a statement whose first column is the session's number."""
        rows = self.database.ask_alone(self, statement, values, longest_s=self._answer_s)
        if rows[0][0] != self.opened.number:
            self.invalidate(None)
            raise LedgerUnavailableError("Another session answered")
        return rows

    def close(self) -> None:
        """Close the connection, and with it what it holds."""
        self.invalidate(None)

    def invalidate(self, error: BaseException | None) -> None:
        """It is lost."""
        del error
        self.is_lost = True
        self._holds.clear()
        with contextlib.suppress(Exception):  # closed already
            self.connection.close()


def _refused(opened: Opened) -> str | None:
    if not opened.own:
        return (
            "a pooler is before the database, whose sessions are not this process's own, and locks "
            "would be whoever's gets the session next. Give a URL past the pooler, or keep the "
            "locks in a table (`taskguard locks create`)."
        )
    if opened.replica:
        return (
            "it is a replica, and its primary knows nothing of its locks. Give the primary's URL."
        )
    return None
