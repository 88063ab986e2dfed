"""`make demo`: it runs, counts right, finds what is wrong, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
import pytest
import sqlalchemy as sa
from rich.console import Console

from support.needs import need
from support.pages import ROOT
from support.waiting import patience_s, wait_until
from taskguard_sandbox.demo.__main__ import main
from taskguard_sandbox.demo.data import DataError, read_orders
from taskguard_sandbox.demo.display import Display
from taskguard_sandbox.demo.effects import count_effects, create_effects
from taskguard_sandbox.demo.faults import Faults
from taskguard_sandbox.demo.journal import BEGAN, WRITES, Line, Tail
from taskguard_sandbox.demo.recording import drawing
from taskguard_sandbox.demo.tally import Tally, tally, total, verdict
from taskguard_sandbox.servers import Postgres, Valkey

COMMAND = [sys.executable, "-m", "taskguard_sandbox.demo"]
ORDERS = ["7", "8", "9"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files that PostgreSQL's user reaches as well: none below pytest's."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        yield folder


@contextmanager
def demo(folder: Path, scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the demo with 24 orders of the user's own and 18 invoices, without a terminal.

    With so many, work is left for the second fault of a queue after the first one.
    """
    need(Valkey)
    need(Postgres)
    data = folder / "orders.csv"
    data.write_text("".join(["order_id,amount\n", *(f"A-{n},1\n" for n in range(24))]))
    process = subprocess.Popen(
        [*COMMAND, "--data", str(data), "--invoices", "18"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch), "COLUMNS": "80"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(patience_s())
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.timeout(1000)
def test_every_effect_is_there_once_though_children_are_killed_and_stopped(
    tmp_path: Path, scratch: Path
) -> None:
    """The counts agree in both queues, and nothing is left behind.

    On a busy machine a child may end before it is struck. One of three runs has each fault in each
    queue.
    """
    assert any(_is_right(tmp_path, scratch) for _ in range(3))


def _is_right(folder: Path, scratch: Path) -> bool:
    """Asserts what holds in each run. Whether there was each fault, with what comes of it."""
    with demo(folder, scratch) as process:
        text, _ = process.communicate(timeout=300)
    print(text)
    assert process.returncode == 0
    rows = _rows(text)
    assert rows["published"] == [72, 54, 126]
    assert rows["effects"] == [24, 18, 42]
    assert rows["double effects"] == rows["lost effects"] == [0, 0, 0]
    ends = ("effects", "answered as duplicates", "deferred", "children killed in a body")
    assert [sum(rows[name][column] for name in ends) for column in range(3)] == rows["deliveries"]
    [booked] = re.findall(r"each once, in order: ((?:\d+ ){23}\d+)", text)
    assert booked.split() == sorted(booked.split(), key=int)
    assert re.search(r"Valkey \d.*PostgreSQL \d.*Celery \d.*RQ \d", text)
    assert "\x1b" not in text
    assert list(scratch.iterdir()) == []
    faults = ("children killed in a body", "children stopped in a body", "stale commits refused")
    lines = ("killed in the body of order:A-", "takeover of ", "stale commit refused: invoice")
    return (
        all(min(rows[row]) >= 1 for row in faults)
        and min(rows["takeovers"]) >= 2
        and all(line in text for line in lines)
    )


BREAK = """
from taskguard_sandbox.demo import effects
write = effects.write_effect

def write_twice(db, queue, item, guard):
    write(db, queue, item, guard)
    if item == "2":
        write(db, queue, item, guard)

effects.write_effect = write_twice
"""


def test_a_task_that_does_it_twice_is_found_out(tmp_path: Path) -> None:
    """The whole way: a body that writes one order's row twice, in a real worker."""
    done = _run_changed(tmp_path, BREAK)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: 1 double and 0 lost effects" in done.stdout
    assert _rows(done.stdout)["effects"] == [4, 1, 5]


def test_a_package_that_is_missing_is_named() -> None:
    """Before anything is started."""
    code = (
        "import sys; sys.modules['rich'] = None; from taskguard_sandbox.demo import __main__ as m"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(m.main([]))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "rich is not installed: `make demo`" in done.stderr


def test_ctrl_c_stops_servers_and_workers(tmp_path: Path, scratch: Path) -> None:
    """In the middle of it: no process and no folder stays."""
    with demo(tmp_path, scratch) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "killed in the body" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) > 5
        process.send_signal(signal.SIGINT)
        assert "servers and workers are stopped" in process.stdout.read()
        assert process.wait(patience_s()) == 130
    wait_until(lambda: not any(each.is_running() for each in family), message="all ended")
    assert list(scratch.iterdir()) == []


def test_the_web_page_shows_the_demos_data(scratch: Path) -> None:
    """`make demo DASHBOARD=1` ends with its address. Ctrl-C ends the page and the demo."""
    pytest.importorskip("uvicorn")
    need(Valkey)
    need(Postgres)
    command = [*COMMAND, "--orders", "3", "--invoices", "1", "--dashboard"]
    environment = {**os.environ, "TMPDIR": str(scratch), "COLUMNS": "300"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"http://\S+token=\S+", line) for line in process.stdout)
            address = next(each.group() for each in found if each)
            visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with visitor.open(address, timeout=patience_s()) as page:
                assert "<h1>Overview</h1>" in page.read().decode()
            item = address.partition("?")[0] + "find?q=order:1"
            with visitor.open(item, timeout=patience_s()) as page:
                assert "order:1" in page.read().decode()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(patience_s())
    assert process.returncode == 0
    assert list(scratch.iterdir()) == []


SWALLOW = """
import os, signal
from taskguard_sandbox.demo.faults import Faults

class Struck:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100_000):
            pass

def strike(self):
    Struck()

Faults.step = strike
"""


def test_ctrl_c_in_a_destructor_counts_as_well(tmp_path: Path) -> None:
    """Python ignores what is raised there: the demo would go on to its end."""
    done = _run_changed(tmp_path, SWALLOW)
    assert done.returncode == 130, done.stdout + done.stderr
    assert "servers and workers are stopped" in done.stderr


def _run_changed(folder: Path, change: str) -> subprocess.CompletedProcess[str]:
    """The whole demo, small, with what `change` does to it as Python starts."""
    need(Valkey)
    need(Postgres)
    (folder / "sitecustomize.py").write_text(change)
    return subprocess.run(
        [*COMMAND, "--orders", "3", "--invoices", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=280,
        check=False,
    )


def _rows(text: str) -> dict[str, list[int]]:
    """The table: the numbers by the name of their row."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {row[0]: [int(cell.replace(",", "")) for cell in row[1:]] for row in cells if row}


def _counted(effects: Counter[str], *, unanswered: int = 0) -> Tally:
    events = Counter({"completed": 3, "duplicate": 6, "deferred": 2, "stale_refused": 1})
    return tally(
        "Celery", items=ORDERS, sent=9, effects=effects, events=events, unanswered=unanswered
    )


def _shown(counted: Tally) -> tuple[int, str]:
    """The exit status, and what is printed."""
    console = Console(width=80)
    with console.capture() as capture:
        status = Display(console).result([counted, total([counted])])
    return status, capture.get()


def test_a_double_effect_in_the_table_is_seen_and_fails_the_demo(tmp_path: Path) -> None:
    """The table takes a second row for an order, and the exit status says so."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'effects.sqlite'}")
    create_effects(engine)
    with engine.begin() as db:
        for order in [*ORDERS, "8"]:
            db.execute(sa.text("insert into effects values ('Celery', :id, 1, 1)"), {"id": order})
    counted = _counted(count_effects(engine, "Celery"))
    engine.dispose()
    assert (counted.double, counted.lost) == (1, 0)
    status, text = _shown(counted)
    assert status == 1
    assert "WRONG: 1 double and 0 lost effects" in text
    assert _rows(text)["double effects"] == [1, 1]


def test_a_lost_effect_and_a_missing_answer_fail_the_demo() -> None:
    """Each for itself; without either all is well."""
    assert _shown(_counted(Counter({"7": 1, "9": 1})))[0] == 1
    assert _counted(Counter({"7": 1, "9": 1})).lost == 1
    assert _shown(_counted(Counter(ORDERS), unanswered=1))[0] == 1
    status, text = _shown(_counted(Counter(ORDERS)))
    assert status == 0
    assert "Right:" in text


def test_deliveries_are_counted_by_how_they_ended() -> None:
    """A killed one ends too; a refused commit's delivery ends as something else."""
    counted = _counted(Counter(ORDERS))
    assert counted.deliveries == 3 + 6 + 2
    assert total([counted, counted]).deliveries == 22
    assert "22 deliveries of 6" in verdict(total([counted, counted]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7\n8\n7\n", ["7", "8"]),
        ("order_id\n7\n", ["7"]),
        ("Order\r\n7\r\n8\r\n", ["7", "8"]),
        ("\ufeffamount;Order_ID\n1;A 7\n2; A 8 \n3;\n", ["A 7", "A 8"]),
        ("7\tx\n8\ty\n", ["7", "8"]),
        ('"Ü, 1",2\n"x",3\n', ["Ü, 1", "x"]),
        ("north\nsouth\n", ["north", "south"]),
    ],
)
def test_order_numbers_come_from_the_column_order_id_or_the_first(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    """With or without a header, and with any separator."""
    data = tmp_path / "orders.csv"
    data.write_text(text, encoding="utf-8")
    assert read_orders(data) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "holds no order numbers"),
        (b"order_id\n", "holds no order numbers"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"a\x00b\n", "is no"),
        (b"x" * 300, "is no order number"),
        (b'"' + b"x" * 200_000, "is not CSV"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    """Before anything is started."""
    data = tmp_path / "orders.csv"
    if content is not None:
        data.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_orders(data)
    assert main(["--data", str(data)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("writes", [False, True])
def test_a_child_is_struck_before_its_transaction_or_not_at_all(writes: bool) -> None:
    """A child that is stopped inside its transaction would hold locked rows, and its work could not
    be taken over."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            faults = Faults("Celery", items=1, say=lambda *_: None)
            faults.hear(Line("Celery", BEGAN, "order:1", pid=child.pid, attempt=1))
            wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
            if writes:
                faults.hear(Line("Celery", WRITES, "order:1", pid=child.pid))
            faults.step()
            faults.step()
            assert faults.killed == (0 if writes else 1)
            if writes:
                assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED
        finally:
            child.kill()


def test_a_journal_gives_whole_lines_once(tmp_path: Path) -> None:
    """Half a line waits for its other half."""
    path = tmp_path / "journal"
    tail = Tail([path])
    assert tail.read() == []
    line = b'{"queue": "RQ", "name": "began", "key": "%s"}\n'
    path.write_bytes(line % b"a" + (line % b"b")[:10])
    assert [each.key for each in tail.read()] == ["a"]
    assert tail.read() == []
    path.write_bytes(line % b"a" + line % b"b")
    assert [each.key for each in tail.read()] == ["b"]


def _texts(svg: str) -> list[str]:
    """The lines of a picture; it is well-formed XML."""
    root = ET.fromstring(svg)
    return [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_recording_shows_the_lines_and_cuts_pauses() -> None:
    """Lines that only count progress are left out, except the first one."""
    run = [
        (100.0, "Starting <Valkey> …"),
        (130.0, "  1.0 s         0 of 9 orders shipped, 0 of 3 invoices charged"),
        (131.0, "  2.0 s         7 of 9 orders shipped, 1 of 3 invoices charged"),
        (131.0, ""),
        (131.1, "Right: 9 effects"),
        (131.1, "Your own tasks:  README.md"),
    ]
    svg = drawing(run)
    assert _texts(svg) == ["$ make demo", run[0][1], run[1][1], "Right: 9 effects"]
    assert re.findall(r"animation-delay: ([\d.]+)s", svg) == ["0.0", "0.5", "1.0", "1.6"]


def test_the_recording_in_the_readme_is_one_of_a_right_run() -> None:
    """With the rows that the demo prints today; otherwise it has to be recorded again."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"^!\[make demo: .*\]\((.*\.svg)\)$", readme, re.MULTILINE)
    lines = _texts((ROOT / picture).read_text(encoding="utf-8"))
    rows = _rows("\n".join(lines))
    _, shown = _shown(_counted(Counter(ORDERS)))
    assert [row for row in rows if row] == [row for row in _rows(shown) if row]
    assert rows["effects"] == [200, 100, 300]
    assert rows["double effects"] == rows["lost effects"] == [0, 0, 0]
    assert all(min(rows[f"children {how} in a body"]) >= 1 for how in ("killed", "stopped"))
    assert any(line.startswith("Right: ") for line in lines)
