"""Each line of installation in README and examples, in an environment with only that.

A real worker on real servers runs the example of the README as printed: one effect, and a duplicate
that is answered. The examples run from such environments, too. The tests' own environment cannot
add a missing package, because it is not on the path.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import sqlalchemy as sa
import urllib3

from support.needs import need
from support.pages import blocks_of
from support.waiting import patience_s, wait_until
from taskguard_sandbox.servers import Etcd, Postgres, Valkey
from taskguard_sandbox.workers import CeleryWorker

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parent.parent.parent
LINE = re.compile(r"pip install '(celery-taskguard\[[\w,]+\])'")

# The purpose of each line; the README's example is tried with ledgers and brokers below.
WITH_CELERY = {
    "celery-taskguard[celery,redis,postgresql]": ("pg_url", ["redis", "rabbitmq"]),
    "celery-taskguard[celery,redis,mysql]": ("mariadb_url", ["redis"]),
    "celery-taskguard[celery,redis,sqlite]": ("sqlite_url", ["redis"]),
}
EXAMPLES = {
    "celery_shop/shop.py": "shipments: {7: 1, 8: 1, 9: 1}",
    "sqlalchemy_shop/shop.py": "orders: {7: ('BILLED', 1, 1), 8: ('BILLED', 1, 1), "
    "9: ('CANCELLED', 0, 0)}",
    "billing/billing.py": "payments: {7: 1, 8: 1}",
    "django_shop/shop.py": "parcels: {7: 1, 8: 1, 9: 1}",
    "rq_invoices/invoices.py": "payments: {7: 1, 8: 1}",
    "rq_sqlite/measurements.py": "lines: {'a.txt': 9, 'b.txt': 5}",
    "fenced_elsewhere/elsewhere.py": "status and label are the second process's: True",
}
# With locks only, which need no database.
LOCKS, LOCKS_FOR_CELERY, LOCKS_FOR_RQ = (
    f"celery-taskguard[{extras}]" for extras in ("redis", "celery,redis", "rq,redis")
)
TESTED = "celery-taskguard[celery,pytest]"
SCRIPTS = "celery-taskguard[redis,postgresql]"
COMMAND = "celery-taskguard[cli,postgresql]"


def lines_of(file: Path) -> list[str]:
    """Return the commands of installation in a file, each once."""
    return list(dict.fromkeys(LINE.findall(file.read_text(encoding="utf-8"))))


def line_of(example: str) -> str:
    """The one that an example's README names."""
    (line,) = lines_of(ROOT / "examples" / Path(example).parent / "README.md")
    return line


def test_every_line_of_installation_is_tried() -> None:
    """A new line in a README needs its test here."""
    tried = {*WITH_CELERY, TESTED, SCRIPTS, COMMAND, *map(line_of, EXAMPLES)}
    found = {line for file in ROOT.glob("**/README.md") for line in lines_of(file)}
    assert found == tried
    assert set(lines_of(ROOT / "README.md")) == tried - {line_of("fenced_elsewhere/elsewhere.py")}
    assert line_of("tested_shop/shop.py") == TESTED
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^pip install '\.(\[[\w,]+\])'$", readme, re.MULTILINE)
    assert f"celery-taskguard{extras}" in WITH_CELERY


@pytest.fixture
def outside(tmp_path: Path, pycache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's own, and an environment that knows nothing of this checkout."""
    for name in list(os.environ):
        if name.startswith(("PYTHON", "TASKGUARD_L", "CELERY", "DJANGO")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(pycache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(command: list[str | Path], **environment: str) -> str:
    """Return the output of a command, which has to succeed."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CALLS = "from shop import pay\nfor _ in range(2):\n    pay.delay(42, 1999)"


class Case(NamedTuple):
    """The installation, ledger and broker for the README's example."""

    line: str
    ledger: str
    broker: str


def placed(code: str, places: dict[str, str]) -> str:
    """The README's code, with the servers that are here."""
    for printed, here in places.items():
        assert code.count(f'"{printed}"') == 1, printed
        code = code.replace(f'"{printed}"', repr(here))
    return code


CASES = [
    pytest.param(
        Case(line, ledger, broker),
        marks=pytest.mark.debian if {ledger, broker} & {"mariadb_url", "rabbitmq"} else (),
        id=f"{broker}-{ledger.removesuffix('_url')}",
    )
    for line, (ledger, brokers) in WITH_CELERY.items()
    for broker in brokers
]


@pytest.fixture
def places(
    request: pytest.FixtureRequest, case: Case, valkey: Valkey, redis_url: str
) -> dict[str, str]:
    """Return the servers here for the URLs in the README."""
    del redis_url  # empties the server
    rabbitmq = case.broker == "rabbitmq"
    broker = request.getfixturevalue("rabbitmq").url if rabbitmq else valkey.url_of(0)
    return {
        "redis://localhost/1": valkey.url_of(1),
        "redis://localhost": broker,
        "sqlite:///shop.db": request.getfixturevalue(case.ledger),
    }


@pytest.mark.parametrize("case", CASES)
def test_the_example_of_the_readme_charges_once(
    case: Case, installed: Callable[[str], Path], places: dict[str, str], outside: Path
) -> None:
    """The example as printed, except its URLs, charges once for two calls."""
    commands = installed(case.line)
    (module,) = blocks_of("README.md", "python")
    (outside / "shop.py").write_text(placed(module.text, places), encoding="utf-8")
    url = places["sqlite:///shop.db"]
    said([commands / "taskguard", "ledger", "create", "--url", url])
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as db:
        db.execute(sa.text("create table orders (id int, receipt varchar(40))"))
        db.execute(sa.text("insert into orders (id) values (42)"))
    with CeleryWorker("shop", python_path=outside, python=commands / "python") as worker:
        said([commands / "python", "-c", CALLS], PYTHONPATH=".")
        try:
            wait_until(lambda: worker.log.count("succeeded in") == 2)
        finally:
            print(worker.log)
        assert worker.log.count("answered as a duplicate") == 1
        assert worker.log.count("charging 1999 cents") == 1
    with engine.connect() as db:
        assert db.execute(sa.text("select receipt from orders")).scalars().all() == ["receipt-1"]
        records = sa.text("select state, attempts from taskguard_work")
        assert db.execute(records).all() == [("DONE", 1)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_from_the_installation_that_its_readme_names(
    example: str, installed: Callable[[str], Path], outside: Path
) -> None:
    """An example survives what its README tells to try: the first process that says it is at work
    is killed, and another one does its work. Only the sandbox that starts its servers is added to
    the installation."""
    need(Valkey)
    need(Postgres)
    readme = (ROOT / "examples" / example).with_name("README.md").read_text()
    assert f"python examples/{example}\n" in readme
    commands = installed(line_of(example))
    # Long enough to be killed meanwhile; for two lines of a file, of which there are several.
    seconds = [] if "elsewhere" in example else ["--seconds", "3" if "sqlite" in example else "6"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "sandbox"),
        "TASKGUARD_SERVERS": sysconfig.get_path("purelib"),
    }
    process = subprocess.Popen(
        [commands / "python", "-u", ROOT / "examples" / example, *seconds],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=outside,
        env=environment,
    )
    output = ""
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if seconds and " by process " in line and " by process " not in output:
                    os.kill(int(line.split()[-1]), signal.SIGKILL)
                output += line
        assert process.wait(patience_s()) == 0, output
    finally:
        process.kill()
        process.wait(patience_s())
    assert EXAMPLES[example] in output.splitlines()
    assert output.count("takes over") >= (1 if seconds else 3), output
    if not seconds:  # it kills one process itself, and stops two
        assert output.count("wakes up and is refused") == 2
        assert "charge requests: 2, charges: 1" in output.splitlines()


def test_the_tested_shop_runs_from_the_installation_that_its_readme_names(
    installed: Callable[[str], Path], outside: Path
) -> None:
    """pytest finds the fixtures by itself. The output has the table of the correct task, and the
    tests of the wrong tasks pass, too."""
    del outside
    folder = ROOT / "examples" / "tested_shop"
    assert "python -m pytest examples/tested_shop\n" in (folder / "README.md").read_text()
    command = [installed(TESTED) / "python", "-m", "pytest", "-rP", "-p", "no:cacheprovider"]
    output = said([*command, folder])
    assert "5 passed" in output
    assert "transaction.commit done                       2        1" in output


def test_a_script_takes_the_plain_lock_and_calls_a_guarded_function(
    installed: Callable[[str], Path], redis_url: str, pg_url: str, outside: Path
) -> None:
    """The README's block about cron jobs, web handlers and scripts, with no queue installed."""
    page = ROOT / "docs" / "how-to" / "one-at-a-time.md"
    readme = page.read_text(encoding="utf-8")
    block = readme.partition("```python\nimport taskguard\n")[2].partition("```")[0]
    commands = installed(SCRIPTS)
    said([commands / "taskguard", "ledger", "create", "--url", pg_url])
    servers = {"redis://localhost/1": redis_url}
    block = placed(block, {**servers, "postgresql+psycopg://shop@localhost/shop": pg_url})
    block = block.replace(") -> None: ...", ") -> None: return print('ran')")
    script = outside / "script.py"
    script.write_text(f"import taskguard\n{block}\nprint(lease.fence)\nreport(1)\nreport(1)\n")
    fence, *ran = said([commands / "python", script]).split()
    assert int(fence) > 0
    assert ran == ["ran"]


ONLY_LOCKS = """
from concurrent.futures import ThreadPoolExecutor
import taskguard
from taskguard.errors import MissingDriverError

tg = taskguard.connect(locks={url!r}, ledger=None)
with tg.lock("report:42") as lease:
    print(lease.fence)
    another = ThreadPoolExecutor(1).submit(tg.lock("report:42").__enter__)
    print(type(another.exception()).__name__)
try:
    taskguard.connect(locks={url!r}, ledger="postgresql+psycopg://shop@localhost/shop")
except MissingDriverError as error:
    print(error)
"""
ONLY_LOCKS_IN_CELERY = """
from celery import Celery
from taskguard import Guard
from taskguard_celery import guarded_task

app = Celery("shop", broker={broker!r})
app.conf.taskguard_locks_url = {url!r}
app.conf.taskguard_ledger_url = None

@app.task(acks_late=True, reject_on_worker_lost=True)
@guarded_task(key="order:<order_id>")
def ship(order_id: int, guard: Guard) -> str:
    return f"fence {{guard.fence}}"
"""
ONLY_LOCKS_IN_RQ = """
import taskguard_rq
from taskguard import Guard

taskguard_rq.configure(locks={url!r}, ledger=None)

@taskguard_rq.guarded_job(key="order:<order_id>")
def ship(order_id: int, guard: Guard) -> None:
    print(f"fence {{guard.fence}}", flush=True)
"""


def test_a_lock_needs_no_database(
    installed: Callable[[str], Path], redis_url: str, outside: Path
) -> None:
    """The lock excludes, `doctor` looks at its server, and a missing driver is named."""
    script = outside / "script.py"
    script.write_text(ONLY_LOCKS.format(url=redis_url))
    commands = installed(LOCKS)
    fence, busy, missing = said([commands / "python", script]).splitlines()
    assert int(fence) > 0
    assert busy == "KeyBusyError"
    assert "pip install 'celery-taskguard[postgresql]'" in missing
    assert "0 errors" in said([commands / "taskguard", "doctor", "--locks", redis_url])


@pytest.mark.debian
@pytest.mark.parametrize("extra", ["etcd", "consul", "zookeeper"])
def test_a_lock_server_of_an_integration(
    request: pytest.FixtureRequest, installed: Callable[[str], Path], extra: str, outside: Path
) -> None:
    """Its extra brings the driver, and its entry point the URL; another extra's error names it."""
    url = request.getfixturevalue(extra).url
    script = outside / "script.py"
    script.write_text(ONLY_LOCKS.format(url=url))
    commands = installed(f"celery-taskguard[{extra}]")
    fence, busy, _ = said([commands / "python", script]).splitlines()
    assert int(fence) > 0
    assert busy == "KeyBusyError"
    assert "0 errors" in said([commands / "taskguard", "doctor", "--locks", url])
    ended = subprocess.run(
        [installed(LOCKS) / "taskguard", "doctor", "--locks", url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert f"pip install 'celery-taskguard[{extra}]'" in " ".join(ended.stdout.split())


WITHOUT_METADATA = """
import taskguard
import taskguard_etcd
from taskguard.errors import ConfigurationError

try:
    taskguard.connect(locks={url!r}, ledger=None)
except ConfigurationError as error:
    print(error)
with taskguard.connect(locks=taskguard_etcd.EtcdLocks({url!r}), ledger=None).lock("a") as lease:
    print(lease.fence)
"""


@pytest.mark.debian
def test_a_checkout_on_the_python_path_has_no_entry_points(etcd: Etcd, outside: Path) -> None:
    """The error says what to install, or what to pass, which then works."""
    place = outside / "env"
    said([sys.executable, "-m", "venv", "--without-pip", place])
    script = outside / "script.py"
    script.write_text(WITHOUT_METADATA.format(url=etcd.url))
    (outside / "urllib3").symlink_to(Path(urllib3.__file__).parent)
    path = os.pathsep.join(map(str, [ROOT, ROOT / "integrations", outside]))
    error, fence = said([place / "bin" / "python", script], PYTHONPATH=path).splitlines()
    assert "pip install 'celery-taskguard[etcd]'" in error
    assert "locks=taskguard_etcd.EtcdLocks(url)" in error
    assert int(fence) > 0


def test_the_page_about_providers_makes_a_package(
    installed: Callable[[str], Path], outside: Path
) -> None:
    """The package that the page describes can be installed, and its URL works."""
    page = "docs/how-to/lock-provider.md"
    provider, factory, _ = blocks_of(page, "python")
    (project,) = blocks_of(page, "toml")
    source = outside / "source"
    source.mkdir()
    (source / "lockfile.py").write_text(provider.text + factory.text)
    (source / "pyproject.toml").write_text(project.text)
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", outside]
    said([sys.executable, *build, source])
    (wheel,) = outside.glob("*.whl")
    # As pip installs a wheel, but not into an environment that other tests use.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(outside / "site")
    script = outside / "script.py"
    url, path = f"lockfile://{outside}/locks.db", str(outside / "site")
    script.write_text(ONLY_LOCKS.format(url=url))
    commands = installed(LOCKS)
    fence, busy, _ = said([commands / "python", script], PYTHONPATH=path).splitlines()
    assert int(fence) > 0
    assert busy == "KeyBusyError"
    doctor = [commands / "taskguard", "doctor", "--locks", url]
    assert "0 errors" in said(doctor, PYTHONPATH=path)


def test_a_task_of_celery_needs_no_database(
    installed: Callable[[str], Path], valkey: Valkey, redis_url: str, outside: Path
) -> None:
    """With locks only a worker runs two messages of a key, each by a fence of its own."""
    del redis_url
    broker, url = valkey.url_of(0), valkey.url_of(1)
    (outside / "shop.py").write_text(ONLY_LOCKS_IN_CELERY.format(broker=broker, url=url))
    commands = installed(LOCKS_FOR_CELERY)
    with CeleryWorker("shop", python_path=outside, python=commands / "python") as worker:
        calls = "from shop import ship; ship.delay(42); ship.delay(42)"
        said([commands / "python", "-c", calls], PYTHONPATH=".")
        try:
            wait_until(lambda: worker.log.count("succeeded in") == 2)
        finally:
            print(worker.log)
        assert len(set(re.findall(r"'fence (\d+)'", worker.log))) == 2


def test_a_job_of_rq_needs_no_database(
    installed: Callable[[str], Path], valkey: Valkey, redis_url: str, outside: Path
) -> None:
    """With locks only a worker runs two jobs of a key, each by a fence of its own."""
    del redis_url
    broker, url = valkey.url_of(0), valkey.url_of(1)
    (outside / "shop.py").write_text(ONLY_LOCKS_IN_RQ.format(url=url))
    rq = [installed(LOCKS_FOR_RQ) / "python", "-m", "rq.cli"]
    for _ in range(2):
        said([*rq, "enqueue", "-u", broker, "shop.ship", ":42"], PYTHONPATH=".")
    guarded = ["--worker-class", "taskguard_rq.GuardedWorker", "--burst"]
    log = said([*rq, "worker", "-u", broker, *guarded], PYTHONPATH=".")
    assert len(set(re.findall(r"fence (\d+)", log))) == 2, log


def test_the_command_alone_lists_works(
    installed: Callable[[str], Path], pg_url: str, outside: Path
) -> None:
    """On a machine without any queue, and a URL of a server that is not installed is explained."""
    del outside
    command = installed(COMMAND) / "taskguard"
    said([command, "ledger", "create", "--url", pg_url])
    assert "create table taskguard_work" in said([command, "ledger", "create", "--sql"]).lower()
    ended = subprocess.run(
        [command, "ledger", "create", "--url", "mysql+pymysql://shop@127.0.0.1:1/shop"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "pip install 'celery-taskguard[mysql]'" in ended.stderr
    said([command, "work", "list", "--url", pg_url])
