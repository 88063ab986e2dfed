"""The pages: each function reads the rows of one page.

Guarantees: a page changes nothing. It reads a bounded number of rows, and has a link to more.
Arguments, results and progress are read only for operators, and only with `show_arguments`.

Read next: `overview.py`, the first page; `picture.py`, the picture of a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from taskguard.integration import Configuration, State, WorkFilter, examine, exposition
from taskguard_dashboard.board import Board
from taskguard_dashboard.http import Denied, Request, Response
from taskguard_dashboard.overview import overview_of
from taskguard_dashboard.picture import picture_of
from taskguard_dashboard.rendering import html, redirect
from taskguard_dashboard.security import HEADERS
from taskguard_dashboard.texts import csv_of, iso

__all__ = ["PAGES", "filter_of", "item_of", "key_of", "now_s", "report_of"]

_ROWS = 50
_CSV_ROWS = 10_000
_HISTORIES = 10
SINCE_S = {"15m": 900.0, "1h": 3_600.0, "6h": 21_600.0, "24h": 86_400.0, "7d": 604_800.0}
_LONGER_S = {"10s": 10.0, "1m": 60.0, "10m": 600.0, "1h": 3_600.0}


def now_s(page: Board) -> float:
    """Return the time by the database's clock, which is compared with ours once a minute."""

    def apart_s() -> float:
        ledger = page.tg.ledger
        return 0.0 if ledger is None else ledger.now_us() / 1e6 - time.time()

    return time.time() + page.shared("clock", apart_s, for_s=60.0)


def key_of(page: Board, request: Request) -> Any:
    """Return the key that a request names. Raises Denied if it is not on record."""
    name = _named(request, "key")
    return _on_record(page.tg.operations.key(name), f"the key {name}")


def item_of(page: Board, request: Request) -> Any:
    """Return the work that a request names. Raises Denied if it is not on record."""
    name = _named(request, "work", "id")
    shown = page.show_arguments and request.role == "operator"
    return _on_record(page.tg.operations.work(name, arguments=shown), f"the work {name}")


def _named(request: Request, *fields: str) -> str:
    """Return the name that one of these fields has. Raises Denied if none has one."""
    name = next(filter(None, map(request.value, fields)), None)
    if name is None:
        raise Denied(400, f"No {fields[0]} is given. Search for one.")
    return name


def _on_record(found: Any, what: str) -> Any:
    if found is None:
        raise Denied(404, f"There is no record of {what}. It never began, or was purged.")
    return found


def filter_of(page: Board, request: Request) -> WorkFilter:
    """Return the filter in a request. Raises Denied if it is none."""
    state, since = request.value("state"), request.value("since")
    if state and state not in State.__members__:
        raise Denied(400, "There is no such state.")
    if since and since not in SINCE_S:
        raise Denied(400, "There is no such time.")
    return WorkFilter(
        state=State(state) if state else None,
        task=request.value("task") or None,
        key=request.value("key") or None,
        prefix=request.value("prefix") or None,
        since_s=now_s(page) - SINCE_S[since] if since else None,
        overdue=bool(request.value("overdue")),
    )


def _in_words(page: Board, items: Iterable[Any]) -> tuple[Any, ...]:
    """Return work with the names of processes in its error and its history."""
    operations = page.tg.operations
    return tuple(
        replace(
            each,
            error=each.error and operations.told(each.error),
            history=_past(page, each.history),
        )
        for each in items
    )


def _past(page: Board, happened: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(replace(each, text=page.tg.operations.in_words(each)) for each in happened)


def _overview(page: Board, request: Request) -> Response:
    at_s = now_s(page)
    found = page.shared("overview", lambda: overview_of(page.tg.operations, at_s), for_s=4.0)
    return html("overview.html", request, now=at_s, **found)


def _keys(page: Board, request: Request) -> Response:
    longer, paused = request.value("longer"), bool(request.value("paused"))
    rows = page.tg.operations.keys(
        paused=paused,
        longer_s=_LONGER_S.get(longer, 0.0),
        limit=_ROWS,
        after=request.value("after") or None,
    )
    return html(
        "keys.html",
        request,
        rows=rows,
        now=now_s(page),
        lengths=list(_LONGER_S),
        longer=longer,
        paused=paused,
    )


def _key(page: Board, request: Request) -> Response:
    name, at_s = _named(request, "key"), now_s(page)
    asked = page.tg.operations.explain(name)  # one reading of the key, with advice
    found, advice = asked.key, asked.advice
    if found is None or not found.key.endswith(name):  # it explained other names
        found, advice = key_of(page, request), ()
    found = replace(found, works=_in_words(page, found.works), past=_past(page, found.past))
    return html(
        "key.html",
        request,
        key=found,
        now=at_s,
        advice=advice,
        picture=picture_of(found, now_s=at_s),
        paused=[each for each in found.holders if each.paused],
        said=request.query.get("said", ""),
    )


def _waiting(page: Board, request: Request) -> Response:
    key, task = request.value("key"), request.value("task")
    if not key and not task:
        lines = page.shared("lines", lambda: page.tg.operations.lines(limit=_ROWS))
        return html("waiting.html", request, lines=lines, now=now_s(page), task="")
    rows = page.tg.operations.waiting(
        key=key or None, task=task or None, limit=_ROWS, after=request.value("after") or None
    )
    return html("messages.html", request, rows=rows, now=now_s(page), of_key=key, task=task)


def _work(page: Board, request: Request) -> Response:
    only = filter_of(page, request)
    csv = request.value("as") == "csv"
    rows = page.tg.operations.list_work(
        only, limit=_CSV_ROWS if csv else _ROWS, after=request.value("after") or None
    )
    if csv:
        return _csv(
            "work.csv",
            (
                "id",
                "task",
                "key",
                "state",
                "attempts",
                "crashes",
                "message",
                "started",
                "finished",
                "error",
            ),
            [
                (
                    each.id,
                    each.task,
                    each.key,
                    each.state,
                    each.attempts,
                    each.crashes,
                    each.message,
                    _time(each.started_s),
                    _time(each.finished_s),
                    each.error,
                )
                for each in rows.items
            ],
        )
    rows = replace(rows, items=_in_words(page, rows.items))
    names = ("state", "task", "key", "prefix", "since", "overdue")
    return html(
        "work.html",
        request,
        rows=rows,
        now=now_s(page),
        states=list(State),
        sinces=list(SINCE_S),
        asked={name: request.value(name) for name in names},
        said=request.query.get("said", ""),
        n=request.query.get("n", ""),
    )


def _dead(page: Board, request: Request) -> Response:
    operations = page.tg.operations
    rows = operations.list_work(
        WorkFilter(state=State.DEAD), limit=_HISTORIES, after=request.value("after") or None
    )
    items = _in_words(page, (operations.work(each.id) or each for each in rows.items))
    return html("dead.html", request, rows=rows, items=items, now=now_s(page))


def _item(page: Board, request: Request) -> Response:
    name, at_s = _named(request, "work", "id"), now_s(page)
    asked = page.tg.operations.explain(name)
    found, advice = asked.work, asked.advice
    if found is None or found.id != name:  # it explained other names
        found, advice = item_of(page, request), ()
    elif page.show_arguments and request.role == "operator":
        found = item_of(page, request)
    [found] = _in_words(page, [found])
    return html(
        "item.html",
        request,
        item=found,
        now=at_s,
        advice=advice,
        said=request.query.get("said", ""),
    )


def _workers(page: Board, request: Request) -> Response:
    rows = page.shared("workers", page.tg.operations.workers)
    recent = [each for each in rows.items if each.age_s < 3_600]
    return html(
        "workers.html",
        request,
        rows=rows,
        now=now_s(page),
        versions=sorted({each.version for each in recent}),
    )


def _actions(page: Board, request: Request) -> Response:
    csv = request.value("as") == "csv"
    rows = page.tg.operations.actions(
        key=request.value("key") or None,
        work=request.value("work") or None,
        limit=_CSV_ROWS if csv else _ROWS,
        after=request.value("after") or None,
    )
    if csv:
        return _csv(
            "actions.csv",
            ("at", "action", "actor", "reason", "key", "work", "task"),
            [
                (
                    _time(each.at_s),
                    each.action,
                    each.actor,
                    each.reason,
                    each.key,
                    each.work,
                    each.task,
                )
                for each in rows.items
            ],
        )
    told = page.tg.operations.told
    named = (replace(each, detail=each.detail and told(each.detail)) for each in rows.items)
    rows = replace(rows, items=tuple(named))
    return html(
        "actions.html",
        request,
        rows=rows,
        now=now_s(page),
        key=request.value("key"),
        work=request.value("work"),
    )


def _doctor(page: Board, request: Request) -> Response:
    return html("doctor.html", request, reports=None, now=now_s(page))


def _metrics(page: Board, _: Request) -> Response:
    """Return what `taskguard exporter` serves."""
    kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    body = page.shared("metrics", lambda: exposition(page.tg.operations))
    return Response(status=200, headers={**HEADERS, **kind}, body=body)


def _find(page: Board, request: Request) -> Response:
    """Send the browser to the key or the work that was asked for, or list what may be meant."""
    text = request.query.get("q", "").strip()
    if not text:
        return redirect("./")
    operations = page.tg.operations
    asked = operations.explain(text)
    if asked.key is None and asked.work is None and not asked.others:
        asked = operations.explain(text, message=True)
    if asked.work is not None and asked.work.id != getattr(asked.key, "key", None):
        return redirect("item", work=asked.work.id)
    if asked.key is not None:
        return redirect("key", key=asked.key.key)
    if operations.list_work(WorkFilter(task=text), limit=1).items:
        return redirect("work", task=text)
    return html("find.html", request, asked=asked, text=text)


def report_of(page: Board) -> Any:
    """Return the reports of the doctor about this application's locks and ledger."""
    return page.shared("doctor", lambda: _examined(page.tg), for_s=10.0)


def _examined(tg: Any) -> Any:
    kept: Any = _Kept(tg)
    return examine(Configuration(lambda: kept))


class _Kept:
    """A runtime that the doctor may not close."""

    def __init__(self, tg: Any) -> None:
        self._tg = tg

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tg, name)

    def close(self) -> None:
        """Do nothing: the application uses it further."""


def _time(at_s: float | None) -> str:
    return "" if at_s is None else iso(at_s)


def _csv(name: str, names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Response:
    kind = {
        "Content-Type": "text/csv; charset=utf-8",
        "Content-Disposition": f'attachment; filename="{name}"',
    }
    return Response(status=200, headers={**HEADERS, **kind}, body=csv_of(names, rows))


PAGES: Mapping[str, Callable[[Any, Request], Response]] = {
    "/": _overview,
    "/keys": _keys,
    "/key": _key,
    "/waiting": _waiting,
    "/work": _work,
    "/item": _item,
    "/dead": _dead,
    "/workers": _workers,
    "/actions": _actions,
    "/doctor": _doctor,
    "/find": _find,
    "/metrics": _metrics,
}
