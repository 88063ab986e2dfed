"""The options of a guard as types, so that editors complete them and type checkers check them.

Guarantees: every decorator takes these options and no other, with these types. The text of an
option is its only documentation: the table in `docs/reference/options.md` is made of these texts.
Tests compare names, types and texts with `Policy`, the decorators and the page.

At run time this module is imported only by a program that names one of its types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from taskguard.keys.function import KeyCallable, KeySpec
from taskguard.model.former import Former
from taskguard.model.policy import Busy, OncePer, OnLost, Order

if TYPE_CHECKING:
    from taskguard.ledger.own_rows.guarded_row import GuardedRow  # it imports SQLAlchemy

__all__ = ["CallOptions", "GuardOptions", "TaskOptions"]


class GuardOptions(TypedDict, total=False):
    """Options of every decorator, in addition to `key`."""

    once_per: OncePer | KeySpec
    """Decides what names the work. Work takes effect once for as long as it is on record."""

    work: str | None
    """First part of the work's id. None: the task's name. Set it before you rename a task."""

    fingerprint: str | KeyCallable | None
    """Template of what must be equal in all messages of one work, for example `"<amount>"`. A
    message that differs raises `FingerprintMismatchError`. Only a digest is stored."""

    row: GuardedRow | None
    """A `GuardedRow`: a row of your own that changes its state with the claim and with the effects
    ([your own row](../how-to/own-row.md))."""

    formerly: Former | Sequence[Former]
    """One `Former` or several: the guard's declaration before a deploy changed its key, `once_per`,
    namespace or name ([changing a guard](../how-to/changing-a-guard.md))."""

    wait_s: float
    """How long `busy="wait"` waits for the key, in seconds, and at most half of a time limit."""

    limit: int
    """How many deliveries may hold a key at once ([limits](../how-to/limits.md)). Needs a ledger
    and one key."""

    rate: str | None
    """How often bodies of a key may start: `"100/m"`. Units: `s`, `m`, `h` and `d`. Needs a ledger
    and one key."""

    burst: int
    """How many bodies may start at once after a pause. Requires `rate`."""

    ttl_s: float
    """Length of the lease, in seconds, renewed after a third of it; at least 0.05. A dead holder's
    key is taken over within this time."""

    max_hold_s: float | None
    """After how many seconds renewal stops and `guard.lost` is set; at least `ttl_s`."""

    max_crashes: int
    """After how many vanished holders the work is DEAD."""

    on_lost: OnLost
    """How the body learns that its lease is lost."""

    atomic: bool
    """Make the whole body one transaction, on `guard.db`. Its return value is committed with it."""

    retention_s: float
    """Refuse a message that is older, in seconds, if its work has no record; at least 1."""

    recoverable: bool
    """Store the task's name and arguments until the work is DONE, so that `taskguard sweep` can
    send a lost message again."""

    namespace: str | None
    """Prefix of every key and work of this task, with a colon. None: the application's namespace.
    `""`: no namespace."""


class CallOptions(GuardOptions, total=False):
    """Options of `tg.guarded()`. No queue can send a plain call again later."""

    busy: Literal["wait", "raise"]
    """Decides what a call does if its key is taken: wait for `wait_s`, or raise `KeyBusyError` at
    once."""


class TaskOptions(GuardOptions, total=False):
    """Options of `guarded_task()` and `guarded_job()`."""

    busy: Busy
    """Decides what a delivery that never started does if other work holds its key."""

    order: Order
    """Order of the messages that are parked for a key ([in order](../how-to/in-order.md))."""

    max_waiting: int | None
    """How many messages may be parked for a key. A further message fails with `LineFullError`."""
