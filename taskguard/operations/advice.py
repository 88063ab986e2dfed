"""Advice about a key or work: sentences and commands, for `explain` and the page.

Pure functions of views. Texts of users are quoted for a shell, and not escaped for a terminal.
"""

from __future__ import annotations

import shlex

from taskguard.model.states import OUTDATED, State
from taskguard.model.views import Held, KeyView, Process, WorkItem

__all__ = ["advice_on", "is_unusual"]

_LONG_S = 10.0
_TIMES = 2.0


def advice_on(key: KeyView | None, work: WorkItem | None, *, now_s: float) -> tuple[str, ...]:
    """Return what to do about the work, or else about the key. Nothing: all is as it should be."""
    if work is not None and work.state is not State.PROCESSING:
        found = _on_ended_or_new(work, key, now_s=now_s)
    elif work is not None and work.left:
        found = _on_left(work)
    elif key is not None:
        found = _on_key(key, now_s=now_s)
    else:
        found = []
    return tuple(found)


def is_unusual(holder: Held, key: KeyView, *, now_s: float) -> bool:
    """Return whether a holder holds its key for much longer than such holders do."""
    lasts_s = now_s - holder.since_s
    usual = key.usual
    if usual is None or usual.task != holder.task or usual.p99_s is None:
        return lasts_s > _LONG_S
    return lasts_s > _TIMES * usual.p99_s


def _on_key(key: KeyView, *, now_s: float) -> list[str]:
    name = shlex.quote(key.key)
    paused = [each for each in key.holders if each.paused]
    if paused:
        return [f"The key is paused. End that: taskguard keys resume {name} --reason …"]
    found = []
    for holder in key.holders:
        if is_unusual(holder, key, now_s=now_s):
            found += _on_holder(holder, now_s=now_s)
    if not key.holders and key.line is not None:
        found.append(
            "The key is free, and messages wait. A worker's relay sends the first one within "
            "seconds. If it does not, look for a relay: taskguard doctor"
        )
    return found


def _on_holder(holder: Held, *, now_s: float) -> list[str]:
    process = holder.process
    name = shlex.quote(holder.key)  # its slot, if the key has slots: others hold theirs rightly
    left_s = max(0.0, holder.lease_until_s - now_s)
    found = []
    if process.pid:
        where = f" on {process.host}" if process.host else ""
        found.append(f"See what it does{where}: py-spy dump --pid {process.pid}")
        found.append(
            f"If it is stuck, end it: kill -9 {process.pid}. Another delivery takes over within "
            f"{left_s:.0f} s of its end, and that counts as a crash."
        )
    found.append(
        f"If it is gone, release the key: taskguard keys release {name} --reason … Its late "
        "commit is refused."
    )
    return found


def _on_left(work: WorkItem) -> list[str]:
    name = shlex.quote(work.id)
    sent = (
        "A relay sends its message."
        if work.stored
        else "Its call is not stored: send its message again by hand."
    )
    return [
        "No worker runs it: its lease has expired. The next delivery of its message takes over.",
        f"Without waiting for that: taskguard work requeue {name} --reason … {sent}",
    ]


def _on_ended_or_new(work: WorkItem, key: KeyView | None, *, now_s: float) -> list[str]:
    name = shlex.quote(work.id)
    requeue = f"taskguard work requeue {name} --reason …"
    if work.state is State.DEAD:
        holders = "1 holder" if work.crashes == 1 else f"{work.crashes} holders"
        vanished = f"{holders} vanished while running it{_hosts(work)}."
        return [
            f"{vanished} Look for memory: dmesg, the limit of the container. Then: {requeue}",
            f"If it must not run: taskguard work drop {name} --reason …",
        ]
    if work.state is State.FAILED and work.final:
        if (work.error or "").startswith(OUTDATED):
            return ["A newer message superseded it. To run it anyway, send the call again."]
        return [f"It never runs. To run it anyway: {requeue}"]
    if work.state is State.FAILED:
        retried = "If its queue retries it, its next delivery runs it."
        return [f"{retried} Otherwise fix the cause of the error, then: {requeue}"]
    if work.state is State.DONE:
        return []
    return _on_new(work, key, now_s=now_s)


def _on_new(work: WorkItem, key: KeyView | None, *, now_s: float) -> list[str]:
    if work.line is not None:
        return [] if key is None else _on_key(key, now_s=now_s)
    if not work.stored:
        return ["It waits for its message. Its call is not stored: look at the queue."]
    if work.due_s is not None and work.due_s < now_s - _LONG_S:
        late = f"Its message is overdue for {now_s - work.due_s:.0f} s."
        return [f"{late} Does a relay run? taskguard doctor, or: taskguard sweep --celery shop:app"]
    return ["Its message is in the queue, or a relay sends it soon."]


def _hosts(work: WorkItem) -> str:
    hosts = sorted({_host(each.process) for each in work.history if each.process} - {""})
    return f" on {', '.join(hosts)}" if hosts else ""


def _host(process: Process | None) -> str:
    return "" if process is None else process.host
