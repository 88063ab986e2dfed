"""How many may hold one key at once, and how often it may be begun: `limit=` and `rate=`.

Guarantees: pure functions, of times in µs of the database's clock. A rate is kept by GCRA, the
generic cell rate algorithm: in no time are there more than `burst` starts beyond what it allows,
and the moment of the next one is known exactly. All that is stored is that moment. A clock that is
set back, and a deploy that makes the rate higher, hold nobody up for longer than one interval.

Does not guarantee anything across a clock that is set forward: it is the time that has passed.

Read next: `ledger/statements/bounded.py`, where they are kept.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

from taskguard.errors import ConfigurationError
from taskguard.values import value

__all__ = ["MOST_SLOTS", "NO_RATES", "Bounds", "Rate", "is_slot", "rate_of", "slots_of"]

MOST_SLOTS = 1_000
"""A delivery that finds all slots taken has asked the lock server for each of them."""

# It comes from no value in a key, and the next character ends the range of a key's slots.
_MARK, _AFTER = "#", "$"
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_is_rate = re.compile(r"([1-9][0-9]{0,8})/([smhd])").fullmatch
# A start would cost as much as there is between two of them.
_LEAST_INTERVAL_US = 100


@value
class Rate:
    """At most one start in `interval_us`, or `burst` of them at once after a pause as long."""

    interval_us: int
    burst: int = 1

    def opens_us(self, next_us: int | None, now_us: int) -> int:
        """From when on the next start is allowed, given what was noted.

        No start lets the next one wait for longer than an interval: where more is noted, the clock
        was set back, or the rate was lower.
        """
        return min(next_us or 0, now_us + self.interval_us)

    def charged_us(self, opens_us: int, now_us: int) -> int:
        """What is to be noted after a start now. `opens_us` may have been long ago."""
        return max(opens_us, now_us - (self.burst - 1) * self.interval_us) + self.interval_us


NO_RATES: Mapping[str, Rate | None] = MappingProxyType({})
"""No rates are declared by the name of a task, so the one on record counts."""


@value
class Bounds:
    """What bounds the holders of a key.

    Attributes:
        key: the key as it was made: its line and its rate are those of this key.
        limit: so many hold it at once; above 1 each of them holds one of its slots.
        rate: how often it may be begun; None: as often as it likes.
        slots: those that a claim may have, in the order in which they are tried; none where the
            limit is 1.
    """

    key: str
    limit: int = 1
    rate: Rate | None = None
    slots: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1_000)
def rate_of(text: object, burst: int) -> Rate:
    """The rate that `rate=` says: "100/m", per second, minute, hour or day.

    The interval is a whole number of µs, and never too short.

    Raises:
        ConfigurationError: it says none.
    """
    found = _is_rate(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigurationError(
            f'rate={text!r}: say how often in which time, for example "100/m"; the time is s, m, h '
            "or d."
        )
    count, in_us = int(found[1]), _SECONDS[found[2]] * 1_000_000
    if in_us < count * _LEAST_INTERVAL_US:
        raise ConfigurationError(f"rate={text!r}: 10,000 in a second is the most that can be kept.")
    return Rate(-(-in_us // count), burst)


def slots_of(key: str, limit: int) -> tuple[str, ...]:
    """The keys of a key's slots. '#' is escaped in values, so they are nobody else's keys."""
    return tuple(f"{key}{_MARK}{number}" for number in range(limit))


def range_of_slots(key: str) -> tuple[str, str]:
    """Texts between which all slots of a key are, byte by byte, however many there were."""
    return key + _MARK, key + _AFTER


def is_slot(text: str, *, of: str) -> bool:
    """Whether it is one of the slots of a key, and no key whose template has a '#' in it."""
    return text.startswith(of + _MARK) and text[len(of) + 1 :].isdecimal()
