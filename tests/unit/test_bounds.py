"""The rate of a key: what is allowed in how much time, and what a clock may do to it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from taskguard.errors import ConfigurationError
from taskguard.integration import GuardedFunction, MessageRef
from taskguard.model.bounds import Rate, rate_of, slots_of

MINUTE_US = 60_000_000


class Account:
    """A key, asked again and again for a start."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.noted: int | None = None
        self.starts: list[int] = []

    def ask(self, now_us: int) -> int:
        """Begin if that is allowed; returns when the next start is."""
        opens_us = self.rate.opens_us(self.noted, now_us)
        self.noted = opens_us
        if opens_us <= now_us:
            self.noted = self.rate.charged_us(opens_us, now_us)
            self.starts.append(now_us)
        return self.noted

    def most_in(self, window_us: int) -> int:
        """The most starts in any time as long as that."""
        return max(
            sum(first <= start < first + window_us for start in self.starts)
            for first in self.starts
        )


@pytest.mark.parametrize("burst", [1, 10])
def test_ten_minutes_of_a_hundred_a_minute(burst: int) -> None:
    """A caller that comes exactly at its next start uses the whole rate, and at most the burst in
    addition."""
    account, now_us = Account(rate_of("100/m", burst)), 0
    while now_us < 10 * MINUTE_US:
        now_us = max(now_us, account.ask(now_us))
    assert 990 <= len(account.starts) <= 1_000 + burst
    assert account.most_in(MINUTE_US) <= 100 + burst


@pytest.mark.parametrize("seed", range(5))
def test_no_more_than_the_burst_beyond_the_rate_in_any_time(seed: int) -> None:
    """In any interval, starts never exceed the rate by more than the burst."""
    rng = random.Random(seed)
    burst = rng.choice([1, 3, 20])
    account, now_us = Account(rate_of("600/m", burst)), 0
    for _ in range(2_000):
        now_us += int(rng.expovariate(1 / rng.choice([1_000, 100_000, 3_000_000])))
        account.ask(now_us)
    for window_us in (100_000, 1_000_000, MINUTE_US):
        assert account.most_in(window_us) <= window_us // 100_000 + burst


def test_a_clock_that_is_set_back_or_a_higher_rate() -> None:
    """A clock that was set back delays a start by one interval at most, and the noted start says
    so."""
    account = Account(rate_of("1/h", 1))
    account.ask(10**15)
    account.rate = rate_of("100/m", 1)
    assert account.ask(10**15 - 10**13) == 10**15 - 10**13 + 600_000
    account.ask(10**15 - 10**13 + 600_000)
    assert len(account.starts) == 2


def test_an_interval_is_never_too_short() -> None:
    """An interval that is no whole number of µs is rounded up."""
    assert rate_of("7/s", 1).interval_us * 7 >= 1_000_000
    assert rate_of("10000/s", 1).interval_us == 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 0}, "limit=0: give a whole number of at least 1"),
        ({"limit": 2.5}, "limit=2.5"),
        ({"limit": 1_001}, "at most 1,000"),
        ({"rate": "100"}, 'for example "100/m"'),
        ({"rate": "0/m"}, "rate='0/m'"),
        ({"rate": 100}, "rate=100"),
        ({"rate": "10001/s"}, "10,000 in a second"),
        ({"rate": "1/m", "burst": 0}, "burst=0"),
        ({"burst": 5}, "requires rate="),
        ({"limit": 2, "key": ["a:<account>", "b:<account>"]}, "limit= is for one key"),
        ({"limit": 2, "once_per": "key"}, 'limit= never has a second one .* once_per="message"'),
        ({"rate": "1/m", "once_per": "key"}, "the work of a key is done once, so rate= "),
    ],
)
def test_refused_where_it_is_decorated(options: dict[str, object], said: str) -> None:
    """A wrong limit or rate is refused at decoration, with the reason."""

    def pay(account: int) -> None: ...

    given: dict[str, Any] = {"key": "account:<account>", "once_per": "message", **options}
    with pytest.raises(ConfigurationError, match=said):
        GuardedFunction(pay, **given)


def test_a_callable_that_makes_several_keys() -> None:
    """A limit with a callable that makes several keys is refused at the call."""

    def pay(account: int) -> None: ...

    compiled = GuardedFunction(pay, key=lambda account: ["a", "b"], once_per="message", limit=2)
    with pytest.raises(ConfigurationError, match="made 2 for this call: a, b"):
        compiled.delivery((1,), {}, namespace="", message=MessageRef("m"))


def test_slots_are_no_keys_of_arguments() -> None:
    """An argument's text is never the name of a slot."""

    def pay(account: str) -> None: ...

    compiled = GuardedFunction(pay, key="account:<account>", once_per="message")
    delivery = compiled.delivery(("1#0",), {}, namespace="", message=MessageRef("m"))
    assert delivery.keys[0] not in slots_of("account:1", 3)
