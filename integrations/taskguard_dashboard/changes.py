"""Changes by operators: a page that asks for the reason, then the change itself.

Guarantees: a change is one of `tg.operations`, with the reason and the name of the operator. It
carries the fence and the state that the operator saw. If the key or the work has changed since, the
change is refused, and the operator sees why.

Read next: `taskguard/operations/changes.py`, which has the conditional statements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from taskguard.errors import KeyBusyError
from taskguard.integration import Expected, State
from taskguard_dashboard.board import Board
from taskguard_dashboard.http import Denied, Request, Response
from taskguard_dashboard.pages import filter_of, item_of, key_of, now_s, report_of
from taskguard_dashboard.rendering import html, redirect

__all__ = ["CHANGES", "CONFIRMED"]

_REASON_CHARS = 300
_MOST_WORKS = 1_000
_SHOWN = 20
# For how long a pause waits for the holder, less than the timeout of a web server.
_PATIENCE_S = 3.0
_FILTER = ("state", "task", "key", "prefix", "since", "overdue")


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A change that the page offers.

    Attributes:
        path: its path, and the name of its note.
        title: the heading of its page.
        button: the text of its button.
        explains: what it does.
        harms: whether something ends that may be alive.
    """

    path: str
    title: str
    button: str
    explains: str
    harms: bool = False


_RELEASE = _Change(
    path="release",
    title="Release",
    button="Release the key",
    explains="Release a key only if you know that its holder is gone. A holder that is alive "
    "cannot commit any more, and the next delivery is a takeover, which counts as a crash.",
    harms=True,
)
_PAUSE = _Change(
    path="pause",
    title="Pause",
    button="Pause the key",
    explains="While a key is paused, no body runs with it, and its messages wait until an operator "
    "resumes it. If the key is held, the page waits a few seconds for its holder.",
)
_RESUME = _Change(
    path="resume",
    title="Resume",
    button="Resume the key",
    explains="The next message of the key runs.",
)
_REQUEUE = _Change(
    path="requeue",
    title="Requeue",
    button="Requeue",
    explains="The next delivery runs the work again. If its call is stored, a relay sends the "
    "message. Otherwise send it again yourself.",
)
_DROP = _Change(
    path="drop",
    title="Drop",
    button="Drop",
    explains="The work is FAILED for good: no delivery runs it, and its caller reads REVOKED.",
    harms=True,
)
_CALL = _Change(
    path="call",
    title="Call now",
    button="Call now",
    explains="The message of the work goes to its queue now, whether its turn has come or not.",
)
_OF_KEYS = (_RELEASE, _PAUSE, _RESUME)
_OF_WORK = (_REQUEUE, _DROP, _CALL)
_IN_BULK = {"requeue": _REQUEUE, "drop": _DROP}
# The states of work that a change starts from.
_FROM = {
    "requeue": (State.DEAD, State.FAILED),
    "drop": (State.NEW, State.DEAD, State.FAILED),
    "call": (State.NEW, State.PROCESSING),
}


def _reason_of(request: Request) -> str:
    """Return the reason in a form. Raises Denied if there is none."""
    reason = request.value("reason").strip()
    if not reason or len(reason) > _REASON_CHARS:
        raise Denied(400, "Give a reason of at most 300 characters. It is recorded.")
    return reason


def _number_of(request: Request, name: str) -> int | None:
    """Return a number in a form. Raises Denied if it is none."""
    text = request.value(name)
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        raise Denied(400, f"The field {name} is no number.")
    return int(text)


def _said_of(request: Request) -> dict[str, str]:
    return {"reason": _reason_of(request), "actor": request.actor}


def _ask_key(page: Board, request: Request, change: _Change) -> Response:
    """Return the page that asks for the reason to change a key."""
    key = key_of(page, request)
    held = [each for each in key.holders if not each.paused]
    paused = [each for each in key.holders if each.paused]
    problem = ""
    if change is _RELEASE and not held:
        problem = "No process holds the key."
    elif change is _RESUME and not paused:
        problem = "The key is not paused."
    elif change is _PAUSE and paused:
        problem = "The key is paused already."
    facts = [("Held by", each.process.label or each.process.owner) for each in held]
    facts += [("Paused by", f"{each.paused.actor}: {each.paused.reason}") for each in paused]
    expected = {"fence": str(held[0].fence)} if change is _RELEASE and len(held) == 1 else {}
    return html(
        "confirm.html",
        request,
        change=change,
        name=key.key,
        facts=facts,
        works=(),
        more=0,
        target={"key": key.key},
        expected=expected,
        reason="",
        problem=problem,
        may=not problem,
        back=f"{_back('key', key=key.key)}",
    )


def _ask_work(page: Board, request: Request, change: _Change) -> Response:
    """Return the page that asks for the reason to change work."""
    item = item_of(page, request)
    may = item.state in _FROM[change.path] or (change is _REQUEUE and item.left)
    facts = [("State", item.state.value), ("Attempts", str(item.attempts))]
    if item.process is not None:
        facts.append(("Last process", item.process.label or item.process.owner))
    if item.error:
        facts.append(("Error", item.error.splitlines()[0][:300]))
    problem = "" if may else f"The work is {item.state.value}: nothing can be done."
    return html(
        "confirm.html",
        request,
        change=change,
        name=item.id,
        facts=facts,
        works=(),
        more=0,
        target={"work": item.id},
        reason="",
        problem=problem,
        may=may,
        expected={"state": item.state.value, "fence": str(item.fence)},
        back=_back("item", work=item.id),
    )


def _release(page: Board, request: Request) -> Response:
    said, fence = _said_of(request), _number_of(request, "fence")
    key = key_of(page, request).key
    done = page.tg.operations.release(key, fence=fence, **said)
    return _after(
        done,
        "No such holder: it has released the key, or another process holds it now.",
        "key",
        key=key,
        said="release",
    )


def _pause(page: Board, request: Request) -> Response:
    said, key = _said_of(request), _key_name(request)
    try:
        page.tg.operations.pause(key, now=bool(request.value("now")), timeout_s=_PATIENCE_S, **said)
    except KeyBusyError as error:
        raise Denied(409, str(error)) from error
    return redirect("key", key=key, said="pause")


def _resume(page: Board, request: Request) -> Response:
    said, key = _said_of(request), _key_name(request)
    done = page.tg.operations.resume(key, **said)
    return _after(done, "The key is not paused.", "key", key=key, said="resume")


def _change_work(page: Board, request: Request, change: _Change) -> Response:
    """Change one work, if it is still as the operator saw it."""
    said, fence, state = _said_of(request), _number_of(request, "fence"), request.value("state")
    if state and state not in State.__members__:
        raise Denied(400, "There is no such state.")
    item = item_of(page, request)
    expected = Expected(state=State(state) if state else None, fence=fence)
    [done] = _changed(page, change, [item.id], left=item.left, expected=expected, said=said)
    return _after(done, done.why, "item", work=item.id, said=change.path)


def _changed(
    page: Board,
    change: _Change,
    works: list[str],
    *,
    left: bool,
    expected: Expected | Mapping[str, Expected],
    said: Any,
) -> Any:
    operations = page.tg.operations
    if change is _REQUEUE:
        requeue = operations.requeue_left if left else operations.requeue
        return requeue(works, expected=expected, **said)
    make = operations.drop if change is _DROP else operations.call_now
    return make(works, expected=expected, **said)


def _matching(page: Board, request: Request) -> tuple[_Change, list[Any]]:
    """Return the change in bulk that a request names, and the work that matches its filter."""
    change = _IN_BULK.get(request.value("action"))
    if change is None:
        raise Denied(400, "There is no such change in bulk. Use requeue or drop.")
    only = filter_of(page, request)
    if not only.overdue and only.state not in (State.DEAD, State.FAILED):
        raise Denied(400, "Choose DEAD, FAILED or overdue work.")
    if only.overdue and change is not _REQUEUE:
        raise Denied(400, "Overdue work can only be requeued.")
    works: list[Any] = []
    after = None
    while len(works) < _MOST_WORKS:
        rows = page.tg.operations.list_work(
            only, limit=min(200, _MOST_WORKS - len(works)), after=after
        )
        works += rows.items
        after = rows.after
        if after is None:
            break
    return change, works


def _ask_bulk(page: Board, request: Request) -> Response:
    """Return the page that asks for the reason to change all work that matches."""
    change, works = _matching(page, request)
    items = f"{len(works):,} work item{'s' * (len(works) != 1)}"
    asked = {name: request.value(name) for name in _FILTER}
    bulk = _Change(
        path="bulk",
        title=f"{change.title} {items}",
        button=f"{change.button} {items}",
        explains=change.explains,
        harms=change.harms,
    )
    facts = [(name.capitalize(), text) for name, text in asked.items() if text]
    return html(
        "confirm.html",
        request,
        change=bulk,
        name="",
        facts=facts,
        works=works[:_SHOWN],
        more=max(len(works) - _SHOWN, 0),
        reason="",
        may=bool(works),
        target={"action": change.path, **asked},
        expected={"until": str(int(now_s(page) * 1e6)), "count": str(len(works))},
        problem="" if works else "No work matches.",
        back=_back("work", **asked),
    )


def _bulk(page: Board, request: Request) -> Response:
    """Change all work that matches, and that was so when the operator looked."""
    said, until_us = _said_of(request), _number_of(request, "until")
    change, works = _matching(page, request)
    if until_us is not None:
        works = [each for each in works if (each.since_s or 0.0) * 1e6 <= until_us]
    seen = {each.id: Expected(state=each.state, fence=each.fence) for each in works}
    left = bool(request.value("overdue"))
    done = _changed(page, change, list(seen), left=left, expected=seen, said=said)
    asked = {name: request.value(name) for name in _FILTER}
    return redirect("work", **asked, said=change.path, n=str(sum(map(bool, done))))


def _check(page: Board, request: Request) -> Response:
    """Run the doctor. It writes a key of its own at the lock server, so it is no GET."""
    return html("doctor.html", request, reports=report_of(page), now=now_s(page))


def _key_name(request: Request) -> str:
    name = request.value("key")
    if not name:
        raise Denied(400, "No key is given.")
    return name


def _after(done: Any, why: str, path: str, **values: str) -> Response:
    """Return to the page of what was changed. Raises Denied if it was not."""
    if not done:
        raise Denied(409, why)
    return redirect(path, **values)


def _back(path: str, **values: str) -> str:
    return redirect(path, **values).headers["Location"]


def _asking(ask: Callable[[Any, Request, _Change], Response], change: _Change) -> Any:
    return lambda page, request: ask(page, request, change)


CONFIRMED: Mapping[str, Callable[[Any, Request], Response]] = {
    **{f"/{change.path}": _asking(_ask_key, change) for change in _OF_KEYS},
    **{f"/{change.path}": _asking(_ask_work, change) for change in _OF_WORK},
    "/bulk": _ask_bulk,
}
CHANGES: Mapping[str, Callable[[Any, Request], Response]] = {
    "/release": _release,
    "/pause": _pause,
    "/resume": _resume,
    **{f"/{change.path}": _asking(_change_work, change) for change in _OF_WORK},
    "/bulk": _bulk,
    "/doctor": _check,
}
