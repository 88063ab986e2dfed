"""The options of a guarded task, for Celery, RQ and plain functions. They are checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Literal, get_args

from taskguard.errors import ConfigurationError
from taskguard.model.bounds import MOST_SLOTS, Rate, rate_of
from taskguard.values import value

__all__ = [
    "AGAIN_AFTER_S",
    "DAY_S",
    "LEAST_PURGE_AGE_S",
    "MOST_ROWS",
    "MOST_S",
    "Busy",
    "Newest",
    "OnLost",
    "OncePer",
    "Order",
    "Policy",
    "check_namespace",
    "check_number",
    "make_policy",
    "replaces_holder",
]

Busy = Literal["retry", "park", "latest", "supersede", "wait", "skip", "raise"]
Newest = Literal["latest", "supersede"]
Order = Literal["best_effort", "strict", "priority"]
OncePer = Literal["key", "run", "message", "tick"]
OnLost = Literal["fence", "interrupt"]

DAY_S = 86_400.0
LEAST_PURGE_AGE_S = 3_600.0
"""Minimum age of ended work that a purge deletes."""

AGAIN_AFTER_S = 3_600.0
"""Default time without a claim after which a message that was sent counts as lost, in seconds."""

# A hundred years: a longer time does not fit into the clocks of databases and lock servers.
MOST_S = 36_500 * DAY_S
MOST_ROWS = 2**31 - 1
_MAX_NAMESPACE_BYTES = 100


@value(kw_only=True)
class Policy:
    """How a guarded task behaves: its options, checked. docs/reference/options.md has each.

    Only this module compares values of options. Other modules read the attributes below.

    Attributes:
        parks: whether a delivery that finds its key taken waits in the ledger.
        newest: "latest" or "supersede" if only the newest message of a key runs; None: each runs.
        strict: whether a message keeps its position in line until its work has ended.
        ranked: whether the priority of a message decides its position in line.
        stores_calls: whether a claim stores the call, so that it is sent again if its process dies.
        resends: whether taskguard may send a message again that its queue does not have.
        interrupts: whether a lost lease raises LeaseLostError in the body's thread.
        replaces_holder: whether a newer message also takes the key from a holder at work.
        waits_up_to_s: for how long a worker waits for a held key before it defers the message.
        drops: whether a delivery that finds its key held is dropped, unless its work has begun.
        defers: whether a delivery that finds its key held, and is not parked, is deferred.
        has_slots: whether several deliveries may hold the key at once, each in a slot of its own.
        bounded: whether the task has a limit above 1, or a rate.
    """

    busy: Busy = "retry"
    order: Order = "best_effort"
    max_waiting: int | None = None
    wait_s: float = 0.0
    limit: int = 1
    rate: str | None = None
    burst: int = 1
    ttl_s: float = 30.0
    max_hold_s: float | None = None
    max_crashes: int = 3
    on_lost: OnLost = "fence"
    atomic: bool = False
    retention_s: float = 30 * DAY_S
    recoverable: bool = False
    namespace: str | None = None
    # Computed once, because each delivery reads them.
    parks: bool = field(init=False, repr=False, compare=False)
    newest: Newest | None = field(init=False, repr=False, compare=False)
    strict: bool = field(init=False, repr=False, compare=False)
    ranked: bool = field(init=False, repr=False, compare=False)
    stores_calls: bool = field(init=False, repr=False, compare=False)
    resends: bool = field(init=False, repr=False, compare=False)
    interrupts: bool = field(init=False, repr=False, compare=False)
    replaces_holder: bool = field(init=False, repr=False, compare=False)
    waits_up_to_s: float = field(init=False, repr=False, compare=False)
    drops: bool = field(init=False, repr=False, compare=False)
    defers: bool = field(init=False, repr=False, compare=False)
    has_slots: bool = field(init=False, repr=False, compare=False)
    bounded: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _one_of("busy", self.busy, get_args(Busy))
        _one_of("order", self.order, get_args(Order))
        _one_of("on_lost", self.on_lost, get_args(OnLost))
        check_number("ttl_s", self.ttl_s, at_least=0.05)
        check_number("wait_s", self.wait_s, at_least=0)
        check_number("retention_s", self.retention_s, at_least=1)
        check_number("max_crashes", self.max_crashes, at_least=1, at_most=MOST_ROWS, whole=True)
        if self.max_hold_s is not None:
            check_number("max_hold_s", self.max_hold_s, at_least=self.ttl_s)
        check_number("limit", self.limit, at_least=1, at_most=MOST_SLOTS, whole=True)
        check_number("burst", self.burst, at_least=1, at_most=MOST_ROWS, whole=True)
        if self.rate is not None:
            _check_burst(rate_of(self.rate, self.burst), self)
        elif self.burst != 1:
            raise ConfigurationError(
                f"burst={self.burst} requires rate=. Add rate= or remove burst=."
            )
        if self.max_waiting is not None:
            check_number("max_waiting", self.max_waiting, at_least=1, at_most=MOST_ROWS, whole=True)
        if self.busy == "wait" and not self.wait_s:
            raise ConfigurationError('busy="wait" needs wait_s=, the maximum wait in seconds.')
        if self.namespace is not None:
            check_namespace(self.namespace)
        newest = None if self.busy not in ("latest", "supersede") else self.busy
        parks, strict = newest is not None or self.busy == "park", self.order == "strict"
        facts = {
            "newest": newest,
            "parks": parks,
            "strict": strict,
            "ranked": self.order == "priority",
            "stores_calls": self.recoverable or strict,
            "resends": self.recoverable or parks,
            "interrupts": self.on_lost == "interrupt",
            "replaces_holder": replaces_holder(newest),
            "waits_up_to_s": self.wait_s if self.busy == "wait" else 0.0,
            "drops": self.busy == "skip",
            "defers": self.busy not in ("skip", "raise"),
            "has_slots": self.limit > 1,
            "bounded": self.limit > 1 or self.rate is not None,
        }
        for name, fact in facts.items():
            object.__setattr__(self, name, fact)

    @property
    def starts(self) -> Rate | None:
        """`rate` and `burst`, or None if there is no rate."""
        return None if self.rate is None else rate_of(self.rate, self.burst)


def replaces_holder(newest: Newest | None) -> bool:
    """Return True if a newer message also takes the key from a holder at work."""
    return newest == "supersede"


def check_namespace(given: object) -> str:
    """Return a namespace with which keys can begin. Raises ConfigurationError for any other."""
    if not isinstance(given, str) or any(not c.isprintable() or c in " {}%" for c in given):
        raise ConfigurationError(f"namespace={given!r}: use letters, digits and -_.~@+:/ only.")
    if len(given.encode()) > _MAX_NAMESPACE_BYTES:
        raise ConfigurationError(
            f"namespace={given[:20]!r}…: use {_MAX_NAMESPACE_BYTES} bytes at most, because "
            "every key begins with it."
        )
    return given


def _check_burst(rate: Rate, policy: Policy) -> None:
    """Refuse a burst that a purge could forget: a purge looks at the next start only."""
    back_s = (rate.burst - 1) * rate.interval_us / 1e6
    if back_s > max(policy.retention_s, LEAST_PURGE_AGE_S):
        raise ConfigurationError(
            f"burst={policy.burst} with rate={policy.rate!r} counts starts for {back_s:g} s, and a "
            f"purge may forget them after retention_s ({policy.retention_s:g} s). Use a lower "
            "burst or a longer retention_s."
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ConfigurationError(f"{name}={value!r}: {name}= is one of {choices}.")


def check_number(
    name: str,
    value: object,
    *,
    at_least: float,
    at_most: float = MOST_S,
    whole: bool = False,
) -> None:
    """Raise ConfigurationError unless it is a number in this range. Infinity and NaN are not."""
    kinds = int if whole else int | float
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    if not fits or not at_least <= value <= at_most:  # type: ignore[operator]  # it is a number
        kind = "a whole number" if whole else "a number"
        bound = f"of at least {at_least:g}"
        if isinstance(value, int | float) and value > at_most:
            bound = f"of at most {at_most:,.0f}"
        raise ConfigurationError(f"{name}={value!r}: give {kind} {bound}.")


def make_policy(options: Mapping[str, Any], *, task: str, **defaults: Any) -> Policy:
    """Return the policy for `options`. The error for an unknown option names the nearest one."""
    known = [option.name for option in fields(Policy) if option.init]
    for name in options:
        if name not in known:
            import difflib  # for this error alone

            near = difflib.get_close_matches(
                name, ["key", "once_per", "work", "fingerprint", "row", "formerly", *known], n=1
            )
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"{task}: unknown option {name!r}.{hint} Known: {', '.join(sorted(known))}."
            )
    try:
        return Policy(**{**defaults, **options})
    except ConfigurationError as error:
        raise ConfigurationError(f"{task}: {error}") from None
