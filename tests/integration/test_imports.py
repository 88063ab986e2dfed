"""A process loads no driver that it does not need. An error names the extra of a missing
package."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.drivers import ALL, run_without

LEADS = """
import taskguard
tg = taskguard.connect(locks="memory://", ledger=None)
tg.leader("beat").run(lambda leadership: leadership.step_down())
"""
CELERY = """
from celery import Celery
from taskguard.errors import ConfigurationError
from taskguard_celery import enqueue, guarded_task
app = Celery("shop", broker="memory://")
app.conf.update(taskguard_locks_url="memory://", taskguard_ledger_url=None)

@app.task
@guarded_task(key="order:<order_id>")
def ship(order_id):
    return order_id

assert ship.apply((42,)).get() == 42
try:
    enqueue(ship, (42,))
except ConfigurationError as error:
    assert "Calls are stored in a ledger" in str(error)
"""
COMMAND = """
from taskguard.cli import main
try:
    main({words!r})
except SystemExit as end:
    assert end.code == 0
"""
# kombu checks whether Django is there.
NEEDS_NO_MORE = {
    "a leader": (LEADS, set[str]()),
    "tasks of Celery": (CELERY, {"celery", "kombu", "django"}),
    "taskguard_rq": ("import taskguard_rq", {"rq", "redis"}),
    "taskguard_django": ("import taskguard_django.apps", {"django"}),
    "taskguard.locks": ("import taskguard.locks", set[str]()),
    "taskguard_etcd": ("import taskguard_etcd", {"urllib3"}),
    "taskguard_consul": ("import taskguard_consul", {"urllib3"}),
    "taskguard_zookeeper": ("import taskguard_zookeeper", {"kazoo"}),
    "taskguard_prometheus": ("import taskguard_prometheus", {"prometheus_client"}),
    "taskguard_otel": ("import taskguard_otel", {"opentelemetry"}),
    "taskguard_dashboard": ("import taskguard_dashboard", set[str]()),
    "the pytest plugin": ("import pytest_taskguard.plugin", set[str]()),
    "taskguard --help": (COMMAND.format(words=["--help"]), set[str]()),
    "taskguard doctor": (COMMAND.format(words=["doctor", "--locks", "memory://"]), set[str]()),
}


@pytest.mark.parametrize("what", NEEDS_NO_MORE)
def test_what_runs_without_a_database_loads_no_driver_of_one(what: str) -> None:
    """With locks only, SQLAlchemy is not installed; where it is, loading it takes 0.5 s."""
    code, needs = NEEDS_NO_MORE[what]
    run_without(ALL - needs, code)


FIRST_CALL = """
import sys
import taskguard
from taskguard.ledger.sql import SqlLedger

ledger = SqlLedger("sqlite:///{database}")
ledger.create_schema()
ledger.close()
tg = taskguard.connect(locks=None, ledger="sqlite:///{database}")
tg.guarded(key="order")(lambda: None)()
loaded = [name for name in sys.modules if name.startswith("taskguard.")]
assert not [name for name in loaded if name.startswith("taskguard.operations")], loaded
of_ledger = [name for name in loaded if name.startswith("taskguard.ledger.operations.")]
assert of_ledger == ["taskguard.ledger.operations.counts"], of_ledger
assert "taskguard.model.views" not in loaded
"""


def test_a_guarded_call_loads_nothing_that_only_operators_need(tmp_path: Path) -> None:
    """The first call of a process pays for each module."""
    run_without(set(), FIRST_CALL.format(database=tmp_path / "ledger.db"))


CONNECT = "taskguard.connect(locks={!r}, ledger={!r})"
REDIS = ["redis://h", "rediss://h", "valkey://h", "unix:///s", "sentinel://h/m", "redlock://h,i,j"]
REDIS += ["redis+cluster://h"]
DATABASES = {
    "postgresql": ["postgresql+psycopg", "postgresql+advisory"],
    "mysql": ["mysql+pymysql", "mariadb+pymysql", "mysql+advisory", "mariadb+advisory"],
}
OF_A_DATABASE = [
    *(
        (CONNECT.format(f"{scheme}://h/d", None), extra)
        for extra, schemes in DATABASES.items()
        for scheme in schemes
    ),
    (CONNECT.format(None, "postgresql+psycopg://h/d"), "postgresql"),
    (CONNECT.format(None, "mariadb+pymysql://h/d"), "mysql"),
]
NAMES = ["SqlLedger", "GuardedRow", "ddl_statements", "include_name", "upgrade_statements"]
MISSING = {
    "redis": [
        *((CONNECT.format(url, None), "redis") for url in REDIS),
        ("taskguard.fenced.set_value(None, 'a', 'b', fence=1)", "redis"),
        ("main(['doctor', '--locks', 'redis://h'])", "redis"),
    ],
    "kazoo": [(CONNECT.format("zookeeper://h", None), "zookeeper")],
    "urllib3": [
        (CONNECT.format(f"{scheme}://h", None), scheme.rstrip("s"))
        for scheme in ("etcd", "etcds", "consul", "consuls")
    ],
    "sqlalchemy": [
        *OF_A_DATABASE,
        (CONNECT.format(None, "sqlite:///d"), "sqlite"),
        (CONNECT.format("ledger://", None), "postgresql"),
        (
            "taskguard.connect(locks='memory://', ledger=None).guarded(key='k')(fence)()",
            "postgresql",
        ),
        *((f"taskguard.{name}", "postgresql") for name in NAMES),
        ("main(['ledger', 'create', '--sql'])", "postgresql"),
        ("main(['ledger', 'create', '--url', 'sqlite:///d'])", "sqlite"),
        ("main(['locks', 'create', '--sql'])", "postgresql"),
        ("main(['locks', 'create', '--url', 'mysql+pymysql://h/d'])", "mysql"),
        ("main(['work', 'list', '--url', 'mysql+pymysql://h/d'])", "mysql"),
        ("import taskguard_django.conf as c; c.url_of(None)", "django"),
    ],
    "psycopg": [case for case in OF_A_DATABASE if case[1] == "postgresql"],
    "pymysql": [case for case in OF_A_DATABASE if case[1] == "mysql"],
    "MySQLdb": [(CONNECT.format(None, "mysql://h/d"), "mysql")],
    "celery": [
        ("import taskguard_celery", "celery"),
        ("import taskguard_celery.beat", "celery"),
        ("main(['sweep', '--celery', 'shop:app'])", "celery"),
        ("main(['doctor', '--celery', 'shop:app'])", "celery"),
    ],
    "rq": [
        ("import taskguard_rq", "rq"),
        ("main(['relay', '--rq', 'redis://h'])", "rq"),
        ("main(['doctor', '--rq', 'redis://h'])", "rq"),
    ],
    "django": [("import taskguard_django", "django")],
    "fakeredis": [
        ("from pytest_taskguard import Memory; Memory('sqlite:///d')", "pytest"),
    ],
}
TRYING = """
import contextlib, io
import taskguard
from taskguard.cli import main

def fence(guard):
    guard.fenced(None)

for code, extra in {cases!r}:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            exec(code)
    except taskguard.errors.MissingDriverError as error:
        assert isinstance(error, ImportError)
        said.write(str(error))
    assert f"pip install 'celery-taskguard[{{extra}}]'" in " ".join(said.getvalue().split()), (
        code, said.getvalue()
    )
"""


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_package_is_named_with_its_extra(package: str) -> None:
    """MissingDriverError, which is an ImportError as well, and the command name the extra."""
    run_without({package}, TRYING.format(cases=MISSING[package]))
