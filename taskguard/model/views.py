"""Answers to operators about keys, work, lines and workers. Values only.

The command line prints them, `--json` has their fields under these names, and a web page shows
them. So a field keeps its name and its meaning. Times are seconds since 1970, and durations have
`left`, `age` or `lasts` in their names.

Texts are as the ledger has them. Escape them before a terminal, a page or a label. The id of a
message is the one that Celery or RQ shows.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from taskguard.model.history import Flag
from taskguard.model.line_states import LineState
from taskguard.model.pauses import Pause
from taskguard.model.states import State
from taskguard.values import value

__all__ = [
    "ActionView",
    "Explained",
    "Held",
    "KeyView",
    "LineView",
    "Page",
    "Past",
    "Process",
    "Usual",
    "WaitingView",
    "WorkFilter",
    "WorkItem",
    "WorkerView",
]

_Item = TypeVar("_Item")


@value
class Page(Generic[_Item]):
    """Some rows of an answer.

    Attributes:
        items: the rows.
        after: pass it to get the next page. None: there are no more rows.
        note: why rows may be missing, in one sentence. "": none are.
    """

    items: tuple[_Item, ...]
    after: str | None = None
    note: str = ""


@value
class Process:
    """A process that holds or held a key, as its owner's text and `taskguard_workers` name it.

    Attributes:
        owner: the whole text of the owner.
        label: for people: "celery@web-3, pid 4711". "" if taskguard did not write the owner.
        worker: the number of the worker.
        pid: the process.
        message: the message that it runs.
        kind: "celery", "rq" or "plain". This and all below are "" and None for a worker without a
            record.
        name: the name that the queue knows.
        host: its machine or container.
        version: the version of taskguard.
        started_s: when the worker started.
        seen_s: when the worker was last seen. It says so about three times an hour.
    """

    owner: str
    label: str
    worker: str = ""
    pid: int = 0
    message: str = ""
    kind: str = ""
    name: str = ""
    host: str = ""
    version: str = ""
    started_s: float | None = None
    seen_s: float | None = None


@value
class Held:
    """A key, or one of its slots, with its holder.

    Attributes:
        key: the key, or the slot: "order:42#0".
        process: its holder.
        fence: the fencing token.
        since_s: when it was claimed.
        lease_until_s: when its lease ends, unless it is renewed.
        work: the id of the work that it runs. None for a plain lock, and for a pause.
        task: the task of that work.
        attempt: the number of the attempt.
        paused: the pause, if the holder is one.
    """

    key: str
    process: Process
    fence: int
    since_s: float
    lease_until_s: float
    work: str | None = None
    task: str | None = None
    attempt: int | None = None
    paused: Pause | None = None


@value
class WaitingView:
    """A message in the line of its key.

    Attributes:
        key: the key.
        work: the id of its work.
        task: its task.
        message: the message.
        parked_s: when it was sent, or came.
        line: its state in the line.
        state: the state of the work.
        position: 1 for the first. None: it was not counted.
        expected_until_s: the end of the time in which its promoted message is expected.
        expires_s: when it expires. None: never.
        sent_again: how often its message was sent again since it was promoted.
        holder: the key's holder, in the first row of a key of a list. None if it has slots.
    """

    key: str
    work: str
    task: str
    message: str
    parked_s: float
    line: LineState
    state: State
    position: int | None = None
    expected_until_s: float | None = None
    expires_s: float | None = None
    sent_again: int = 0
    holder: Held | None = None


@value
class LineView:
    """The line of a key.

    Attributes:
        key: the key.
        waiting: how many messages are in it, counted up to a maximum.
        more: True if there are more than that.
        oldest_s: since when its first message waits.
        promoted: how many of the counted messages were sent and have not begun.
        first: its first message.
        holder: the key's holder, or None.
    """

    key: str
    waiting: int
    more: bool
    oldest_s: float
    promoted: int
    first: WaitingView
    holder: Held | None = None


@value
class Past:
    """Something that happened to work or to a key.

    Attributes:
        at_s: when, or when the last of `n` happened.
        what: a value of `model.history.Happened`, or of `Action` for what an operator did.
        text: the error, or the reason.
        process: the process that it happened to.
        fence: the fencing token of that process.
        n: how often.
        work: the work, if it happened to one.
        task: its task.
        actor: the operator.
    """

    at_s: float
    what: str
    text: str = ""
    process: Process | None = None
    fence: int | None = None
    n: int = 1
    work: str | None = None
    task: str | None = None
    actor: str = ""


@value
class Usual:
    """How long bodies of a task hold their keys, as the counts tell.

    Attributes:
        task: the task.
        n: how many bodies were counted.
        mean_s: their mean, in seconds.
        p99_s: 99 % of them took at most this long. None: longer than the longest bucket.
    """

    task: str
    n: int
    mean_s: float
    p99_s: float | None


@value
class WorkItem:
    """The record of work.

    Attributes:
        id: its id: the task and the key, or what `once_per=` gives.
        task: the task.
        key: its key. Several keys have ", " between them.
        message: the message that runs it.
        state: its state.
        final: FAILED for good.
        attempts: how often its body started.
        crashes: how many of its holders vanished.
        retries: the number of the message's retry.
        process: its holder, or its last one. None: no process has claimed it since it was NEW.
        fence: the fencing token of the last claim.
        lease_until_s: when the holder's lease ends, if it is PROCESSING.
        left: it is PROCESSING, and its lease has expired: no worker runs it.
        flag: why an operator may look for it. None: for no reason.
        since_s: since when it has the flag.
        error: the last error.
        stored: its call is stored, so that a relay can send its message.
        sends: how often its message was sent again since the last claim.
        due_s: when a relay sends its message, unless it is claimed before.
        line: its state in the line of its key.
        parked_s: since when it is in that line.
        created_s: when it was recorded.
        started_s: when its last attempt began.
        finished_s: when it ended.
        trace: the W3C traceparent of the span that claimed it.
        history: what happened to it, the oldest first. Empty in lists.
        call: the stored call with its arguments. This and all below are None unless asked for.
        result_json: the result.
        progress_json: the stored progress.
    """

    id: str
    task: str
    key: str
    message: str
    state: State
    final: bool
    attempts: int
    crashes: int
    retries: int
    process: Process | None
    fence: int
    lease_until_s: float | None
    left: bool
    flag: Flag | None
    since_s: float | None
    error: str | None
    stored: bool
    sends: int
    due_s: float | None
    line: LineState | None
    parked_s: float | None
    created_s: float | None
    started_s: float | None
    finished_s: float | None
    trace: str | None = None
    history: tuple[Past, ...] = ()
    call: str | None = None
    result_json: str | None = None
    progress_json: str | None = None


@value
class KeyView:
    """A key with everything that an operator asks about it.

    Attributes:
        key: the key, without a slot.
        holders: the holders of the key, or of its slots.
        slots: how many slots it had at its last claim. None: it has none.
        next_start_s: with a rate: when the next body may start.
        line: its line. None: no message waits.
        waiting: the first messages of the line.
        works: the last work of the key, the newest first, without history.
        past: what happened to the key and to that work, the newest first.
        usual: how long the holder's task usually holds its key.
    """

    key: str
    holders: tuple[Held, ...]
    slots: int | None = None
    next_start_s: float | None = None
    line: LineView | None = None
    waiting: tuple[WaitingView, ...] = ()
    works: tuple[WorkItem, ...] = ()
    past: tuple[Past, ...] = ()
    usual: Usual | None = None


@value
class Explained:
    """The answer to "what is going on with this?".

    Attributes:
        asked: the text that was asked about.
        now_s: the database's clock.
        key: the key, if it is one, or the key of the work.
        work: the work, if it is one.
        others: other keys or works that were found. If `key` and `work` are None, choose one.
        advice: what to do, one sentence or command each.
        note: why something may be missing. "": nothing is.
    """

    asked: str
    now_s: float
    key: KeyView | None = None
    work: WorkItem | None = None
    others: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    note: str = ""


@value
class WorkerView:
    """A worker.

    Attributes:
        number: the first 8 digits of its owners.
        kind: "celery", "rq" or "plain".
        name: the name that its queue knows.
        host: its machine or container.
        pid: the process that the others were forked from.
        queues: the queues that it reads.
        version: the version of taskguard.
        started_s: when it started.
        seen_s: when it was last seen. It says so about three times an hour.
        age_s: how long ago that was.
    """

    number: str
    kind: str
    name: str
    host: str
    pid: int
    queues: str
    version: str
    started_s: float
    seen_s: float
    age_s: float


@value
class ActionView:
    """A change by an operator.

    Attributes:
        at_s: when.
        action: a value of `model.history.Action`.
        actor: the operator.
        reason: why.
        key: the key that it changed.
        task: the task of the work.
        work: the work that it changed.
        detail: more about it.
    """

    at_s: float
    action: str
    actor: str
    reason: str
    key: str | None = None
    task: str | None = None
    work: str | None = None
    detail: str | None = None


@value(kw_only=True)
class WorkFilter:
    """Which work to list, or to change. All conditions that are given must hold.

    Attributes:
        state: its state.
        task: its task.
        key: its key. With several keys, one of them.
        prefix: the beginning of its id.
        since_s: it is in this state, or was last changed, since this time.
        overdue: only work that no worker is at, although one should be.
    """

    state: State | None = None
    task: str | None = None
    key: str | None = None
    prefix: str | None = None
    since_s: float | None = None
    overdue: bool = False
