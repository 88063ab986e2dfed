"""The options of a guard as types, so that editors complete them and type checkers check them.

Guarantees: every decorator takes these options and no other, with these types. The text of an
option is its only documentation: what it does, and in a second paragraph when to use it. The pages
`docs/reference/options-*.md` are made of these texts. Tests compare names, types and texts with
`Policy`, the decorators and the pages.

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
    """Decides what names the work. Work takes effect once for as long as it is on record.

    Use `"run"` if the work is unique until it has ended, and may then run again
    ([unique until it has ended](../how-to/unique-until-ended.md)). Use `"message"` if each message
    is work of its own, and a template if one key guards several kinds of work.
    """

    work: str | None
    """First part of the work's id, in place of the task's name.

    Use it before you rename a task, or to let two tasks do the same work.
    """

    fingerprint: str | KeyCallable | None
    """Template of the arguments that must be equal in all messages of one work, for example
    `"<amount>"`. A message that differs fails with `FingerprintMismatchError`. Only a digest is
    stored.

    Use it if the same work with other arguments is a mistake, for example another amount.
    """

    row: GuardedRow | None
    """A `GuardedRow`: a row of your own that changes its state with the claim and with the effects
    ([your own row](../how-to/own-row.md)).

    Use it if a status column of yours already says what is done.
    """

    formerly: Former | Sequence[Former]
    """The guard's declaration before a deploy changed its key, `once_per`, namespace or name
    ([changing a guard](../how-to/changing-a-guard.md)). After several such deploys, a list.

    Use it in the deploy that changes a guard. Otherwise work that is done runs again.
    """

    wait_s: float
    """How long `busy="wait"` waits for the key, in seconds. With a time limit, at most half of it.

    Use it for a wait of a few seconds. The message occupies its worker while it waits.
    """

    limit: int
    """How many deliveries may hold a key at once ([limits](../how-to/limits.md)). Needs a ledger
    and one key.

    Use it if another system takes only a few calls at once.
    """

    rate: str | None
    """How often bodies of a key may start, for example `"100/m"`. Units are `s`, `m`, `h` and `d`.
    Needs a ledger and one key.

    Use it if another system counts calls per minute, hour or day.
    """

    burst: int
    """How many bodies may start at once after a pause. Needs `rate`.

    Use it if a few starts close together do no harm.
    """

    ttl_s: float
    """Length of the lease, in seconds; at least 0.05. taskguard renews the lease after a third of
    it. A dead holder's key is taken over within this time.

    Use a longer lease if bodies block the interpreter for many seconds, and a shorter one to take
    over sooner.
    """

    max_hold_s: float | None
    """Maximum time for which a body holds its key, in seconds; at least `ttl_s`. After that
    taskguard no longer renews the lease, and sets `guard.lost`.

    Use it if a body that hangs must not keep its key for ever.
    """

    max_crashes: int
    """Number of vanished holders (killed workers, expired leases) after which the work is DEAD.

    Use 1 if a task that killed its worker must not be tried again.
    """

    on_lost: OnLost
    """How the body learns that its lease is lost.

    Use `"interrupt"` for a long body that seldom calls `guard.check()`.
    """

    atomic: bool
    """Make the whole body one transaction, on `guard.db`. Its return value is committed with it.

    Use it if the body only writes to the ledger's database.
    """

    retention_s: float
    """Maximum age of a message whose work has no record, in seconds; at least 1. An older message
    fails with `MessageTooOldError`, because its record may have been purged.

    Use a longer time if messages can be in a queue, or be sent again, for more than 30 days. Then
    keep records at least as long: `taskguard purge --older-than`.
    """

    recoverable: bool
    """Store the task's name and arguments until the work is DONE, so that `taskguard sweep` can
    send a lost message again.

    Use it if your broker can lose messages, and the task must still run.
    """

    namespace: str | None
    """Prefix of every key and work of this task, without its colon. None: the application's
    namespace. `""`: no namespace.

    Use it to share keys with another application, or to keep them apart.
    """


class CallOptions(GuardOptions, total=False):
    """Options of `tg.guarded()`. No queue can send a plain call again later."""

    busy: Literal["wait", "raise"]
    """Decides what a call does if its key is taken: wait for `wait_s`, or raise `KeyBusyError` at
    once.

    Use `"wait"` in a program without a queue that can wait for its turn.
    """


class TaskOptions(GuardOptions, total=False):
    """Options of `guarded_task()` and `guarded_job()`."""

    busy: Busy
    """Decides what a delivery that never started does if other work holds its key.

    Use `"park"` if messages must keep their order, `"latest"` if only the newest one matters, and
    `"skip"` if a message may be dropped.
    """

    order: Order
    """Order of the messages that are parked for a key ([in order](../how-to/in-order.md)).

    Use `"strict"` if the order must be exact, and `"priority"` if some messages are urgent.
    """

    max_waiting: int | None
    """How many messages may be parked for a key. A further message fails with `LineFullError`.

    Use it to refuse messages of a key that cannot keep up, instead of storing them all.
    """
