"""The one table of metrics: names, kinds, units, labels, buckets and descriptions.

The exporter, the listeners of Prometheus and OpenTelemetry, the counts in the ledger, the alert
rules, the dashboard and the page of metrics are made from it.

Guarantees: labels are the names of tasks, which the code declares, and values that are listed here
or that the schema fixes. No label has a key, a message, a worker, a host or an error. So the number
of series does not grow with time.

Processes count into rows (task, what, n) of `taskguard_counts`. `what` is "deliveries/done" for a
counter. For a histogram it is "wait/le/0.5", which counts values in that bucket alone, and
"wait/sum". These names are stored, so they stay.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

from taskguard.values import value

__all__ = [
    "COUNTED",
    "GAUGES",
    "METRICS",
    "OTHER_TASK",
    "OUTCOMES",
    "TASKS",
    "Metric",
    "counted_as",
    "zeros_of_process",
    "zeros_of_task",
]

TASKS = 500
"""How many tasks a process counts apart. The others are counted as `OTHER_TASK`."""

OTHER_TASK = "other"


@value(kw_only=True)
class Metric:
    """A metric.

    Attributes:
        name: its name in `taskguard_counts`, without prefix and unit.
        kind: "counter", "histogram" or "gauge".
        unit: as OpenTelemetry writes units: "s", "By", "{delivery}"; "" for an info.
        help: what it measures, in one sentence.
        by_task: whether its first label is `task`.
        labels: its other labels.
        values: the combinations of values that these labels may have. Empty: the schema or the
            version fixes them.
        buckets: upper limits of the buckets of a histogram, without infinity.
    """

    name: str
    kind: str
    unit: str
    help: str
    by_task: bool = False
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus, such as `taskguard_wait_seconds`."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return f"taskguard_{self.name}{unit}{'_total' if self.kind == 'counter' else ''}"

    @property
    def opentelemetry(self) -> str:
        """Its name in OpenTelemetry, from which an exporter makes the name in Prometheus."""
        return f"taskguard.{self.name}"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return ("task", *self.labels) if self.by_task else self.labels

    def what(self, *values: str) -> str:
        """Return the name of one of its counters in the ledger."""
        return "/".join((self.name, *values))

    def sum(self, *values: str) -> str:
        """Return the name of the sum of a histogram in the ledger."""
        return f"{self.what(*values)}/sum"

    def bucket(self, seconds: float, *values: str) -> str:
        """Return the name of the bucket in the ledger that counts a value."""
        place = bisect_left(self.buckets, seconds)
        return self._bucket(place, values)

    def _bucket(self, place: int, values: tuple[str, ...]) -> str:
        limit = f"{self.buckets[place]:g}" if place < len(self.buckets) else "+Inf"
        return f"{self.what(*values)}/le/{limit}"

    def zeros(self) -> list[str]:
        """Return the names of all its counters in the ledger, for one task if it is by task."""
        names = []
        for values in self.values or ((),):
            if self.kind == "counter":
                names.append(self.what(*values))
            else:
                places = range(len(self.buckets) + 1)
                names += [self._bucket(place, values) for place in places]
                names.append(self.sum(*values))
        return names


OUTCOMES = (
    "done",
    "failed",
    "duplicate",
    "outdated",
    "superseded",
    "replaced",
    "deferred",
    "parked",
    "skipped",
    "refused",
    "stale",
    "revoked",
    "expired",
    "dead",
    "mismatch",
    "too_old",
    "missing",
    "ineligible",
    "unavailable",
    "interrupted",
)
"""How a delivery can end. Each delivery has one outcome.

* failed: the body raised.
* duplicate: the ledger answered, because another delivery had ended the work.
* outdated: a newer message of its task and key took its position.
* superseded: a newer copy of the same message exists.
* replaced: a newer `enqueue()` replaced the message.
* refused: the key was held, and the caller got KeyBusyError.
* stale: the lease was lost, or the database refused the commit.
* dead: the work is DEAD.
* mismatch: the fingerprint differs.
* missing, ineligible: the user's own row is missing, or in another state.
* unavailable: a server gave no answer.
* interrupted: the process had to end, or the body was cancelled.
"""

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_ROUND_TRIPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)

_OPERATIONS = (
    ("locks", "acquire"),
    ("locks", "renew"),
    ("ledger", "claim"),
    ("ledger", "complete"),
    ("ledger", "renew"),
)


def _each(*values: str) -> tuple[tuple[str, ...], ...]:
    return tuple((each,) for each in values)


DELIVERIES = Metric(
    name="deliveries",
    kind="counter",
    unit="{delivery}",
    help="Deliveries by task and outcome. Each delivery has one outcome.",
    by_task=True,
    labels=("outcome",),
    values=_each(*OUTCOMES),
)
TAKEOVERS = Metric(
    name="takeovers",
    kind="counter",
    unit="{takeover}",
    help="Claims of work whose holder vanished: its lease had expired.",
    by_task=True,
)
STALE_COMMITS = Metric(
    name="stale_commits",
    kind="counter",
    unit="{commit}",
    help="Late commits that the database refused, because a newer claim existed.",
    by_task=True,
)
LEASES_LOST = Metric(
    name="leases_lost",
    kind="counter",
    unit="{lease}",
    help="Leases that ended while the body ran.",
    by_task=True,
    labels=("reason",),
    values=_each("expired", "max_hold", "taken"),
)
WAIT = Metric(
    name="wait",
    kind="histogram",
    unit="s",
    help="Seconds from the publication of a message to the claim of its key.",
    by_task=True,
    buckets=_SECONDS,
)
HOLD = Metric(
    name="hold",
    kind="histogram",
    unit="s",
    help="Seconds from the claim of a key to the end of the body.",
    by_task=True,
    buckets=_SECONDS,
)
RENEWALS = Metric(
    name="renewals",
    kind="counter",
    unit="{lease}",
    help="Renewals of leases. A lease whose renewal failed is renewed again until its deadline.",
    labels=("outcome",),
    values=_each("ok", "failed"),
)
SERVER_ERRORS = Metric(
    name="server_errors",
    kind="counter",
    unit="{error}",
    help="Requests to the lock server or the ledger that got no answer.",
    labels=("server", "op"),
    values=_OPERATIONS,
)
OPERATION = Metric(
    name="operation",
    kind="histogram",
    unit="s",
    help="Seconds of a request to the lock server or the ledger that got an answer.",
    labels=("server", "op"),
    values=_OPERATIONS,
    buckets=_ROUND_TRIPS,
)
OPERATOR_ACTIONS = Metric(
    name="operator_actions",
    kind="counter",
    unit="{action}",
    help="Changes that operators made.",
    labels=("action",),
    values=_each("requeue", "requeue_left", "drop", "done", "call", "release", "pause", "resume"),
)
HISTORY_DROPPED = Metric(
    name="history_dropped",
    kind="counter",
    unit="{happening}",
    help="Duplicates and deferrals that are in no history, because a process had too many.",
)
COUNTS_LOST = Metric(
    name="counts_lost",
    kind="counter",
    unit="{count}",
    help="Counts that a process gave up, because the ledger gave no answer for too long.",
)

COUNTED = (
    DELIVERIES,
    TAKEOVERS,
    STALE_COMMITS,
    LEASES_LOST,
    WAIT,
    HOLD,
    RENEWALS,
    SERVER_ERRORS,
    OPERATION,
    OPERATOR_ACTIONS,
    HISTORY_DROPPED,
    COUNTS_LOST,
)
"""Metrics that processes count."""

WORK = Metric(
    name="work",
    kind="gauge",
    unit="{work}",
    help="Work that an operator may look for, by task and state.",
    by_task=True,
    labels=("state",),
    values=_each("failed", "dead", "overdue", "running"),
)
WAITING = Metric(
    name="waiting",
    kind="gauge",
    unit="{message}",
    help="Messages that wait in line for their keys, at most 10,001 in all.",
    by_task=True,
)
WAITING_KEYS = Metric(
    name="waiting_keys",
    kind="gauge",
    unit="{key}",
    help="Keys that messages wait for, at most 1,000.",
)
OLDEST_WAIT = Metric(
    name="oldest_wait",
    kind="gauge",
    unit="s",
    help="Seconds since the message was parked that has waited longest.",
)
OLDEST_OVERDUE = Metric(
    name="oldest_overdue",
    kind="gauge",
    unit="s",
    help="Seconds that work has been overdue: no delivery claimed it in time after it was sent.",
)
LONGEST_HOLD = Metric(
    name="longest_hold",
    kind="gauge",
    unit="s",
    help="Seconds since the claim of the work that has run longest.",
)
PAUSED_KEYS = Metric(
    name="paused_keys",
    kind="gauge",
    unit="{key}",
    help="Keys that an operator has paused.",
)
WORKERS = Metric(
    name="workers",
    kind="gauge",
    unit="{worker}",
    help="Workers that the ledger has seen in the last hour, by kind.",
    labels=("kind",),
)
LEDGER_ROWS = Metric(
    name="ledger_rows",
    kind="gauge",
    unit="{row}",
    help="Rows of the ledger's tables, as the database estimates them.",
    labels=("table",),
)
LEDGER_BYTES = Metric(
    name="ledger",
    kind="gauge",
    unit="By",
    help="Bytes of the ledger's tables with their indexes, as the database estimates them.",
    labels=("table",),
)
OLDEST_ENDED = Metric(
    name="oldest_ended",
    kind="gauge",
    unit="s",
    help="Seconds since the end of the oldest work on record. It grows if nothing is purged.",
)
SNAPSHOT_TIMESTAMP = Metric(
    name="snapshot_timestamp",
    kind="gauge",
    unit="s",
    help="When another gauge was read, in seconds since 1970. Prometheus' clock may differ.",
    labels=("metric",),
)
BUILD_INFO = Metric(
    name="build_info",
    kind="gauge",
    unit="",
    help="1, with the version of taskguard and of the ledger's tables as labels.",
    labels=("version", "schema"),
)

GAUGES = (
    WORK,
    WAITING,
    WAITING_KEYS,
    OLDEST_WAIT,
    OLDEST_OVERDUE,
    LONGEST_HOLD,
    PAUSED_KEYS,
    WORKERS,
    LEDGER_ROWS,
    LEDGER_BYTES,
    OLDEST_ENDED,
    SNAPSHOT_TIMESTAMP,
    BUILD_INFO,
)
"""Metrics that the snapshot of the ledger has."""

METRICS = (*COUNTED, *GAUGES)


def zeros_of_task() -> list[str]:
    """Return what a process counts for each of its tasks, to be written as 0 before it counts.

    A counter that is first seen as 1 is no increase for Prometheus.
    """
    return [name for metric in COUNTED if metric.by_task for name in metric.zeros()]


def zeros_of_process() -> list[str]:
    """Return what a process counts for no task, to be written as 0 before it counts."""
    return [name for metric in COUNTED if not metric.by_task for name in metric.zeros()]


def counted_as(what: str) -> tuple[Metric, tuple[str, ...], str] | None:
    """Return the metric of a name in the ledger, the values of its labels, and what it counts.

    That is "" for a counter, "sum", or the upper limit of a bucket. None: another version of
    taskguard counts it.
    """
    return _named().get(what)


@cache
def _named() -> dict[str, tuple[Metric, tuple[str, ...], str]]:
    names = {}
    for metric in COUNTED:
        for name in metric.zeros():
            parts = name.split("/")[1:]
            values = tuple(parts[: len(metric.labels)])
            names[name] = (metric, values, parts[-1] if metric.kind == "histogram" else "")
    return names
