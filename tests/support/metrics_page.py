"""Write the list of docs/reference/metrics.md from the table of metrics.

PYTHONPATH=tests python tests/support/metrics_page.py
"""

from __future__ import annotations

from collections.abc import Iterable

from support.pages import ROOT
from taskguard.measuring import HEARD
from taskguard.metrics import COUNTED, GAUGES, Metric

__all__ = ["PAGE", "page_as_generated"]

PAGE = ROOT / "docs" / "reference" / "metrics.md"
_BEGIN = "<!-- From here on this page is generated: tests/support/metrics_page.py -->\n"


def page_as_generated() -> str:
    """Return the page as it has to be: its own beginning, and one list for each kind of metric."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    counters = [each for each in COUNTED if each.kind == "counter"]
    histograms = [each for each in COUNTED if each.kind == "histogram"]
    lists = (
        _list("Counters", counters),
        _list("Histograms", histograms),
        _list("Gauges of the ledger", GAUGES),
    )
    return head + _BEGIN + "".join(lists)


def _list(heading: str, metrics: Iterable[Metric]) -> str:
    return f"\n## {heading}\n" + "".join(map(_entry, metrics))


def _entry(metric: Metric) -> str:
    lines = [f": {metric.help}"]
    if metric.by_task:
        lines.append("  Label `task`: the name of the task.")
    lines += map(_values, enumerate(metric.labels), [metric] * len(metric.labels))
    if metric.buckets:
        lines.append(f"  Buckets: {', '.join(f'{each:g}' for each in metric.buckets)} s.")
    if metric in HEARD:
        lines.append(f"  In OpenTelemetry: `{metric.name}`, unit `{metric.unit}`.")
    return f"\n`{metric.prometheus}`\n" + "\n".join(lines) + "\n"


def _values(numbered: tuple[int, str], metric: Metric) -> str:
    number, label = numbered
    values = dict.fromkeys(each[number] for each in metric.values)
    listed = ": " + ", ".join(f"`{each}`" for each in values) if values else ""
    return f"  Label `{label}`{listed}."


if __name__ == "__main__":
    PAGE.write_text(page_as_generated(), encoding="utf-8")
