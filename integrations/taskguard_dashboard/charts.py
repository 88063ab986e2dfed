"""Charts as SVG: what happened to a key over time, and counts over time.

Guarantees: an SVG has classes and no styles, so that the policy of a page allows it. Texts in it
are escaped. Each chart has a text for those that cannot see it.

Does not guarantee exact positions: times outside the picture are drawn at its edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from markupsafe import Markup, escape

from taskguard_dashboard.texts import clock, lasts, number, printable

__all__ = ["Bar", "Mark", "bars", "lanes"]

_WIDTH = 960
_LEFT = 150
_LANE = 26
_LABEL = 22
_MOST_LANES = 12


@dataclass(frozen=True)
class Bar:
    """A time in which something held.

    Attributes:
        lane: the name of its row.
        start_s: when it began.
        end_s: when it ended.
        kind: the number of its colour.
        text: what it is.
    """

    lane: str
    start_s: float
    end_s: float
    kind: int
    text: str


@dataclass(frozen=True)
class Mark:
    """A moment at which something happened, in a row."""

    lane: str
    at_s: float
    kind: int
    text: str


class _Svg:
    """The parts of a picture."""

    def __init__(self, height: float, text: str) -> None:
        self._parts: list[Markup] = []
        self.add(
            '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">',
            _WIDTH,
            height,
            text,
        )

    def add(self, markup: str, *values: object) -> None:
        shown = [round(each, 1) if isinstance(each, float) else each for each in values]
        part = Markup(markup)  # noqa: S704  # a constant, and format() escapes the values
        self._parts.append(part.format(*(escape(each) for each in shown)))

    def rect(self, kind: int, place: tuple[float, float, float, float], text: str) -> None:
        markup = '<rect class="s{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
        self.add(markup, kind, *place, printable(text))

    def text(self, x: float, y: float, anchor: str, text: str) -> None:
        self.add('<text x="{}" y="{}" text-anchor="{}">{}</text>', x, y, anchor, text)

    def drawn(self) -> Markup:
        return Markup("").join([*self._parts, Markup("</svg>")])


def lanes(held: Sequence[Bar], marks: Sequence[Mark], *, now_s: float) -> Markup:
    """Return a picture with a row for each lane, and the time from left to right."""
    rows = [*(each.lane for each in held), *(each.lane for each in marks)]
    names = list(dict.fromkeys(rows))[:_MOST_LANES]
    times = [*(each.start_s for each in held), *(each.at_s for each in marks)]
    if not times:
        return Markup("")
    first_s = min(times)
    lasts_s = max(now_s - first_s, 1.0)
    wide, height = _WIDTH - _LEFT - 8.0, len(names) * _LANE + 28.0
    what = f"{len(held)} holders and {len(marks)} happenings in the last {lasts(lasts_s)}"
    svg = _Svg(height, what)

    def x(at_s: float) -> float:
        return _LEFT + wide * min(max((at_s - first_s) / lasts_s, 0.0), 1.0)

    for row, name in enumerate(names):
        label = printable(name)
        if len(label) > _LABEL:  # the pid is at its end
            label = f"{label[: _LABEL - 14]}…{label[-13:]}"
        lane = '<rect class="lane" x="{}" y="{}" width="{}" height="{}"/>'
        svg.add(lane, _LEFT, row * _LANE + 3, wide, _LANE - 6)
        svg.text(0, row * _LANE + 17, "start", label)
    for bar in (each for each in held if each.lane in names):
        left, y = x(bar.start_s), names.index(bar.lane) * _LANE + 6
        svg.rect(bar.kind, (left, y, max(x(bar.end_s) - left, 3.0), _LANE - 12), bar.text)
    for mark in (each for each in marks if each.lane in names):
        svg.add(
            '<circle class="mark s{}" cx="{}" cy="{}" r="6"><title>{}</title></circle>',
            mark.kind,
            x(mark.at_s),
            names.index(mark.lane) * _LANE + _LANE / 2,
            printable(mark.text),
        )
    for step, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        at_s = first_s + lasts_s * step / 4
        svg.text(x(at_s), height - 6, anchor, clock(at_s, now_s))
    return svg.drawn()


def bars(
    columns: Sequence[tuple[float, Sequence[float]]], names: Sequence[str], *, now_s: float
) -> Markup:
    """Return stacked columns: each has its time and a number for each name."""
    most = max((sum(values) for _, values in columns), default=0.0)
    if not most:
        return Markup("")
    most = _rounded_up(most)
    high, left, low = 144.0, 44.0, 28.0
    wide = (_WIDTH - left) / len(columns)
    totals = [sum(values[at] for _, values in columns) for at in range(len(names))]
    svg = _Svg(high + low, _listed(names, totals))
    for share in (0.0, 0.5, 1.0):
        y = 6 + high * (1 - share)
        svg.add('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>', left, _WIDTH, y, y)
        svg.text(left - 6, y + 4, "end", number(most * share))
    for at, (at_s, values) in enumerate(columns):
        x, y, title = left + at * wide, high + 6, f"{clock(at_s, now_s)}: {_listed(names, values)}"
        for kind, n in enumerate(values, start=1):
            y -= high * n / most
            if n:
                svg.rect(kind, (x + 1, y, max(wide - 2, 1.0), high * n / most), title)
        if at % max(len(columns) // 4, 1) == 0:
            svg.text(x, high + low - 5, "start", clock(at_s, now_s)[-8:-3])
    return svg.drawn()


def _listed(names: Sequence[str], values: Sequence[float]) -> str:
    pairs = zip(names, values, strict=True)
    return ", ".join(f"{name} {number(n)}" for name, n in pairs if n) or "nothing"


def _rounded_up(most: float) -> float:
    """Return the next number that is a multiple of 1, 1.5, 2, 3, 4, 6 or 8 and a power of ten."""
    power = 10.0 ** floor(log10(most))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 6, 8, 10) if step * power >= most)
