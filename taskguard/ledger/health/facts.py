"""Facts of a ledger's database, of whatever kind. Times are in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from taskguard.model.policy import DAY_S
from taskguard.values import value

__all__ = ["MOST_COUNTED", "Bodies", "ServerFacts", "TableFacts"]

# How many rows are read to find old and overdue work.
MOST_COUNTED = 1000


@value
class Bodies:
    """What tasks require of the database.

    Attributes:
        longest_s: how long a body may take.
        idle_s: how long the ledger lets a body's transaction idle. None: without limit.
        retention_s: how long a record is needed.
    """

    longest_s: float = 30.0
    idle_s: float | None = None
    retention_s: float = 30 * DAY_S


@value
class ServerFacts:
    """Settings of the server, as the ledger's connections have them.

    Attributes:
        read_only: why nothing can be written. None: writes are possible.
        unflushed: the setting by which an acknowledged commit can be lost. None: no setting.
        pooled: whether a pooler such as PgBouncer gives each transaction another session.
        prepares: whether the driver prepares statements on an Engine of the user's own.
        limits_s: the settings that end a transaction which takes, or idles, too long.
    """

    read_only: str | None = None
    unflushed: str | None = None
    pooled: bool = False
    prepares: bool = False
    limits_s: Mapping[str, float] = field(default_factory=dict)


@value
class TableFacts:
    """State of the ledger's tables.

    Attributes:
        without_key: tables that have no primary key.
        without_index: names of indexes that are missing or invalid.
        oldest_ended_s: how long ago the oldest work ended, among `MOST_COUNTED` rows.
        overdue: how many messages are overdue for more than 15 minutes, `MOST_COUNTED` at most.
    """

    without_key: tuple[str, ...] = ()
    without_index: tuple[str, ...] = ()
    oldest_ended_s: float | None = None
    overdue: int = 0
