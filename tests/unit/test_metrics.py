"""The table of metrics: names that Prometheus accepts, and names of counts that lead back to it."""

from __future__ import annotations

import re

import pytest

from taskguard import metrics
from taskguard.ledger.tables import COUNTS
from taskguard.metrics import (
    COUNTED,
    DELIVERIES,
    METRICS,
    OPERATION,
    OUTCOMES,
    WAIT,
    Metric,
    counted_as,
)
from taskguard.model.history import Action
from taskguard.model.outcomes import Ended


def test_each_name_is_unique_and_one_of_prometheus() -> None:
    """A counter ends in _total, and nothing else does."""
    names = [each.prometheus for each in METRICS]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"taskguard(_[a-z]+)+", each) for each in names)
    for each in METRICS:
        assert each.prometheus.endswith("_total") == (each.kind == "counter")
        assert each.help.endswith(".")


def test_outcomes_are_those_of_deliveries() -> None:
    """A new outcome needs a value of the label, and a row on the page of metrics."""
    assert tuple(Ended) == OUTCOMES


def test_every_constant_is_in_the_table() -> None:
    """A metric that is declared and not listed would be in no page and in no exporter."""
    declared = [each for each in vars(metrics).values() if isinstance(each, Metric)]
    assert declared == list(METRICS)


@pytest.mark.parametrize("metric", COUNTED, ids=lambda each: each.name)
def test_the_name_of_a_count_leads_back_to_its_metric(metric: Metric) -> None:
    """For each value of its labels and each bucket; and the ledger's column has room for it."""
    column = COUNTS.c.what.type
    for name in metric.zeros():
        assert len(name) <= column.key_chars
        found = counted_as(name)
        assert found is not None
        assert found[0] is metric
        assert len(found[1]) == len(metric.labels)
    assert len(metric.zeros()) == len(set(metric.zeros()))


def test_a_value_is_counted_in_the_first_bucket_that_has_room() -> None:
    """The limit of a bucket belongs to it, as in Prometheus."""
    assert WAIT.bucket(0.0) == "wait/le/0.01"
    assert WAIT.bucket(0.5) == "wait/le/0.5"
    assert WAIT.bucket(0.51) == "wait/le/1"
    assert WAIT.bucket(5_000) == "wait/le/+Inf"
    assert OPERATION.bucket(0.002, "ledger", "claim") == "operation/ledger/claim/le/0.0025"
    assert counted_as("operation/ledger/claim/le/0.0025") == (
        OPERATION,
        ("ledger", "claim"),
        "0.0025",
    )
    assert counted_as("wait/sum") == (WAIT, (), "sum")


def test_counts_of_another_version_have_no_metric() -> None:
    """A newer worker may count what this version does not know."""
    assert counted_as("deliveries/dreamt") is None
    assert counted_as("dreams") is None


def test_zeros_are_of_a_task_or_of_the_process() -> None:
    """Together they are all counts, each once."""
    of_task, of_process = metrics.zeros_of_task(), metrics.zeros_of_process()
    assert DELIVERIES.what("done") in of_task
    assert "renewals/ok" in of_process
    everything = {name for each in COUNTED for name in each.zeros()}
    assert len(of_task) + len(of_process) == len(everything)
    assert {*of_task, *of_process} == everything


def test_actions_of_operators_are_those_of_the_history() -> None:
    """A new action needs a value of the label."""
    known = [value for (value,) in metrics.OPERATOR_ACTIONS.values]
    assert known == [each.value for each in Action]
