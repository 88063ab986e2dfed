"""`taskguard exporter`: counters of all processes, gauges of the ledger, a ledger that is down."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing

import pytest

import taskguard
from support.promtool import check_metrics
from taskguard.cli import main
from taskguard.cli.exporter import serving
from taskguard.ledger.sql import SqlLedger
from taskguard.metrics import DELIVERIES, METRICS, WAIT, zeros_of_process, zeros_of_task
from taskguard.model.counts import Count

prometheus_parser = pytest.importorskip("prometheus_client.parser")


pytestmark = pytest.mark.usefixtures("patient")


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return each sample by its name and the values of its labels, in the order of their names."""
    return {
        (each.name, *(value for _, value in sorted(each.labels.items()))): each.value
        for family in prometheus_parser.text_string_to_metric_families(text)
        for each in family.samples
    }


def test_a_scrape(ledger: SqlLedger) -> None:
    """Totals of two processes are summed, on each database. A counter of a known task that has
    counted nothing is 0."""
    ledger.begin_counts(["ship", 'odd\n"task"'])
    for _ in range(2):
        ledger.add_counts(
            [
                Count("ship", DELIVERIES.what("done"), 3),
                Count("ship", WAIT.bucket(0.03), 2),
                Count("ship", WAIT.bucket(7.0), 1),
                Count("ship", WAIT.sum(), 7.5),
                Count("ship", "of/a/newer/version", 1),
            ]
        )
    with serving(ledger, host="127.0.0.1", port=0) as port:
        text = scrape(port)
    found = samples(text)
    assert found["taskguard_deliveries_total", "done", "ship"] == 6
    assert found["taskguard_deliveries_total", "dead", "ship"] == 0
    assert found["taskguard_deliveries_total", "done", 'odd\\n"task"'] == 0
    assert found["taskguard_wait_seconds_bucket", "0.01", "ship"] == 0
    assert found["taskguard_wait_seconds_bucket", "0.05", "ship"] == 4
    assert found["taskguard_wait_seconds_bucket", "10.0", "ship"] == 6
    assert found["taskguard_wait_seconds_count", "ship"] == 6
    assert found["taskguard_wait_seconds_sum", "ship"] == 15
    assert found["taskguard_work", "dead", "ship"] == 0
    assert found["taskguard_waiting_keys",] == 0
    families = {each.name for each in prometheus_parser.text_string_to_metric_families(text)}
    assert families == {each.prometheus.removesuffix("_total") for each in METRICS}


def test_deliveries_and_operators_are_counted(pg: SqlLedger) -> None:
    """A body, its duplicate and an operator's change, from the guarded function to the scrape."""
    tg = taskguard.connect(locks=None, ledger=pg)

    @tg.guarded(key="order:<order_id>")
    def ship(order_id: int) -> None:
        pass

    for _ in range(2):
        ship(42)
    tg.operations.pause("order:42", actor="ann", reason="why")
    tg.runner.counting.flush.flush()
    with serving(pg, host="127.0.0.1", port=0) as port:
        found = samples(scrape(port))
    counted = {name[1]: n for name, n in found.items() if name[0] == "taskguard_deliveries_total"}
    assert {outcome: n for outcome, n in counted.items() if n} == {"done": 1, "duplicate": 1}
    assert found["taskguard_operator_actions_total", "pause"] == 1
    of_tasks = {
        name[-1] for name in found if name[0] in ("taskguard_work", "taskguard_claims_total")
    }
    assert [name.rpartition(".")[2] for name in of_tasks] == ["ship"]
    assert found["taskguard_paused_keys",] == 1
    assert found["taskguard_operation_seconds_count", "claim", "ledger"] == 2


@pytest.mark.debian
def test_what_prometheus_own_tool_says(pg: SqlLedger) -> None:
    """promtool finds nothing wrong with names, units and texts."""
    pg.begin_counts(["ship"])
    pg.add_counts([Count("ship", WAIT.bucket(0.03), 2), Count("ship", WAIT.sum(), 0.06)])
    with serving(pg, host="127.0.0.1", port=0) as port:
        check_metrics(scrape(port))


def test_counters_of_a_ledger_without_any_process(pg: SqlLedger) -> None:
    """Counters without a task are 0 from the first scrape on, so that its first increase counts."""
    with serving(pg, host="127.0.0.1", port=0) as port:
        found = samples(scrape(port))
        assert found["taskguard_counts_lost_total",] == 0
        assert found["taskguard_renewals_total", "failed"] == 0
        assert not any(name.startswith("taskguard_deliveries") for name, *_ in found)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(port, "/other")


def test_what_a_process_begins_with_is_all_it_may_count(pg: SqlLedger) -> None:
    """Each name that is written as 0 is a sample, and nothing is lost on the way."""
    pg.begin_counts(["ship"])
    assert len(pg.counts()) == len(zeros_of_task()) + len(zeros_of_process())


def test_a_ledger_that_gives_no_answer(sqlite_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The scrape fails with the reason, so that `up` is 0. The exporter goes on."""
    with closing(SqlLedger(sqlite_url)) as ledger:
        with serving(ledger, host="127.0.0.1", port=0) as port:
            for _ in range(2):
                with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                    scrape(port)
                assert b"taskguard ledger create" in refused.value.read()
            ledger.create_schema()
            assert "taskguard_build_info" in scrape(port)
    assert "taskguard ledger create" in capsys.readouterr().err


def test_the_command(sqlite_url: str) -> None:
    """It says where it listens, on the loopback interface, and SIGTERM ends it."""
    with closing(SqlLedger(sqlite_url)) as ledger:
        ledger.create_schema()
    command = [sys.executable, "-m", "taskguard", "exporter", "--url", sqlite_url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert b"taskguard_build_info" in answer.read()
        finally:
            process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before anything is opened."""
    with pytest.raises(SystemExit, match="2"):
        main(["exporter", "--url", "sqlite:///x", "--port", port])
    assert "is not a port" in capsys.readouterr().err


def test_a_port_that_is_taken(
    pg: SqlLedger, pg_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so, without a traceback."""
    with serving(pg, host="127.0.0.1", port=0) as port:
        assert main(["exporter", "--url", pg_url, "--port", str(port)]) == 1
    assert "Cannot listen at 127.0.0.1" in capsys.readouterr().err
