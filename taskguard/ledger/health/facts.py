"""What there is to know of a ledger's database, whatever kind it is. Times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from taskguard.values import value

__all__ = ["Limit", "Limited", "ServerFacts", "Size", "TableFacts"]


class Limited(Enum):
    """What a time-out of the database ends."""

    STATEMENT = "a statement"
    TRANSACTION = "a transaction"
    IDLENESS = "a transaction between two statements"


@value
class Limit:
    """One time-out that is on."""

    name: str
    seconds: float
    of: Limited


@value
class ServerFacts:
    """The server and its settings, as the ledger's connections have them.

    Attributes:
        read_only: what says that nothing can be written; None: it can.
        unflushed: the setting by which a commit that was acknowledged can be lost; None: none can.
        pooled: there is a pooler that gives each transaction another session, as PgBouncer does.
        prepares: the driver prepares statements, on an Engine of the user's own.
        limits: its time-outs, those for bodies among them.
    """

    read_only: str | None = None
    unflushed: str | None = None
    pooled: bool = False
    prepares: bool = False
    limits: tuple[Limit, ...] = ()


@value
class Size:
    """A table's size as the server estimates it."""

    rows: int
    size_bytes: int


@value
class TableFacts:
    """The ledger's tables.

    Attributes:
        without_key: tables that have no primary key.
        without_index: names of indexes that are missing, or not valid.
        other_schemas: those that have such tables, too.
        sizes: by table; empty where the server has no estimates.
        oldest_ended_s: how long ago the oldest work ended, of those that were looked at.
        overdue: how many messages should have been sent a quarter of an hour ago, of a thousand.
    """

    without_key: tuple[str, ...] = ()
    without_index: tuple[str, ...] = ()
    other_schemas: tuple[str, ...] = ()
    sizes: Mapping[str, Size] = field(default_factory=dict)
    oldest_ended_s: float | None = None
    overdue: int = 0
