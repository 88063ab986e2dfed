"""Concurrency limit and rate limit of a key: `limit=` and `rate=`.

Pure functions of times in µs of the database's clock. GCRA, the generic cell rate algorithm, keeps
a rate. The only stored value is the time of the next start.

Guarantees: in any interval *t*, at most rate × *t* + `burst` bodies start. A clock that is set
back, or a deploy that raises the rate, delays a start by one interval at most.

Does not guarantee the rate across a clock that is set forward: it counts as time that has passed.

Read next: `ledger/lines/room.py` and `ledger/statements/gates.py`, where they are kept.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

from taskguard.errors import ConfigurationError
from taskguard.values import value

__all__ = [
    "MOST_SLOTS",
    "NO_RATES",
    "Bounds",
    "Rate",
    "is_slot",
    "rate_of",
    "slots_of",
    "without_slot",
]

MOST_SLOTS = 1_000
"""Maximum of `limit=`: a delivery that finds all slots taken has tried each at the lock server."""

# No value in a key contains it. The next character ends the range of a key's slots.
_MARK, _AFTER = "#", "$"
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_is_rate = re.compile(r"([1-9][0-9]{0,8})/([smhd])").fullmatch
# A shorter interval would be as short as the start itself.
_LEAST_INTERVAL_US = 100


@value
class Rate:
    """At most one start in `interval_us`, or `burst` of them at once after a pause as long."""

    interval_us: int
    burst: int = 1

    def opens_us(self, next_us: int | None, now_us: int) -> int:
        """Return when the next start is allowed, given the stored time.

        That is one interval from now at most. If the stored time is later, the clock was set back,
        or the rate was lower.
        """
        return min(next_us or 0, now_us + self.interval_us)

    def charged_us(self, opens_us: int, now_us: int) -> int:
        """Return the time to store after a start now. `opens_us` may be long past."""
        return max(opens_us, now_us - (self.burst - 1) * self.interval_us) + self.interval_us


NO_RATES: Mapping[str, Rate | None] = MappingProxyType({})
"""No rates are declared by the name of a task, so the one on record counts."""


@value
class Bounds:
    """The limit and rate of a key.

    Attributes:
        key: the key without a slot. It has the line and the rate.
        limit: how many may hold it at once. Above 1, each holder has one of its slots.
        rate: how often bodies of the key may start. None: without a limit.
        slots: the slots that a claim may get, in the order in which to try them. Empty if the limit
            is 1.
    """

    key: str
    limit: int = 1
    rate: Rate | None = None
    slots: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1_000)
def rate_of(text: object, burst: int) -> Rate:
    """Return the rate of a text such as "100/m": per second, minute, hour or day.

    The interval is a whole number of µs, rounded up.

    Raises:
        ConfigurationError: the text is no rate, or a rate that is too high.
    """
    found = _is_rate(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigurationError(
            f'rate={text!r}: give a number and a unit, for example "100/m". The units are s, m, h '
            "and d."
        )
    count, in_us = int(found[1]), _SECONDS[found[2]] * 1_000_000
    if in_us < count * _LEAST_INTERVAL_US:
        raise ConfigurationError(f"rate={text!r}: use 10,000 in a second at most.")
    return Rate(-(-in_us // count), burst)


def slots_of(key: str, limit: int) -> tuple[str, ...]:
    """Return the keys of a key's slots. '#' is escaped in values, so no other key equals them."""
    return tuple(f"{key}{_MARK}{number}" for number in range(limit))


def range_of_slots(key: str) -> tuple[str, str]:
    """Return two texts between which all slots of a key are, byte by byte, at any limit."""
    return key + _MARK, key + _AFTER


def is_slot(text: str, *, of: str) -> bool:
    """Return whether it is a slot of a key, and not a key whose template contains '#'."""
    return text.startswith(of + _MARK) and text[len(of) + 1 :].isdecimal()


def without_slot(text: str) -> str:
    """Return the key of a slot, or a key that is no slot as it is."""
    key, mark, number = text.rpartition(_MARK)
    return key if mark and number.isdecimal() else text
