"""Load drivers once in the worker, so that its work horses do not load them for each job.

`GuardedWorker` loads them when it starts, if its environment names the lock server and the ledger.
A stock worker loads them at its first fork, if it has imported the module of a guarded job. If only
the work horse imports the module that calls `configure()`, it notes which driver modules it had to
load, and the worker loads them before its next fork. Otherwise each job spends 0.2 s on them.

Newer versions of redis-py look up their own version in the file system for each connection. RQ
makes two per job, so this takes a tenth of the processor time of a short job. So the worker passes
the version to its client.

Guarantees: nothing is loaded unless the process forks like an RQ worker. No connection is open
during the fork. The worker does not import your own modules: each work horse imports the jobs'
module, unless the worker has imported it with `-c`.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import sys
from typing import Any

from taskguard.errors import ConfigurationError, LedgerUnavailableError
from taskguard.integration import adopt_worker, describe_worker
from taskguard_rq.runtime import runtime

__all__ = ["describe", "load", "note_loaded", "tell_version"]

_WORKER_VARIABLE = "TASKGUARD_RQ_WORKER"
_VARIABLE_OF_RQ = "RQ_WORKER_ID"

# Options of a client that name a version. With any of them, redis-py looks nothing up.
_SAID = frozenset({"driver_info", "lib_name", "lib_version"})
# Importing these in the worker opens no connection and starts no thread.
_SHARED_BY_HORSES = frozenset(
    {"kazoo", "MySQLdb", "psycopg", "psycopg2", "psycopg_binary", "psycopg_c", "pymysql", "redis"}
    | {"sqlalchemy", "sqlite3", "taskguard", "taskguard_rq"}
    | {"taskguard_consul", "taskguard_etcd", "taskguard_zookeeper", "urllib3"}
)


def load(queue_server: Any) -> None:
    """Load drivers and check the ledger's tables, then close the connections.

    Args:
        queue_server: the worker's redis-py client. Its later connections know its version.

    Raises:
        ConfigurationError: a setting or a table is wrong.
        LedgerUnavailableError: the ledger gives no answer.
    """
    global _is_loaded  # noqa: PLW0603  # once in a process, like modules
    _is_loaded = True
    tell_version(queue_server)
    ledger, names = runtime().ledger, runtime().runner.names
    if ledger is None:
        return
    try:
        ledger.check_schema()
        names.register()
    finally:
        ledger.close()


def _note_seen() -> None:
    """Note in the ledger that this worker was seen, three times an hour. Its jobs do not."""
    ledger, names = runtime().ledger, runtime().runner.names
    if ledger is not None and names.is_due:
        try:
            names.refresh()
        finally:
            ledger.close()


def tell_version(queue_server: Any) -> None:
    """Pass the version of redis-py to a client's connections, unless its options name one."""
    try:
        from redis import DriverInfo
    except ImportError:  # an older version, which looks once, at its import
        return
    pool = queue_server.connection_pool
    options: dict[str, Any] = pool.connection_kwargs
    by_redis_py = pool.connection_class.__module__.startswith("redis.")  # others may refuse it
    if by_redis_py and not _SAID & options.keys():
        options["driver_info"] = DriverInfo()


def describe(worker: Any) -> None:
    """Name this worker, as RQ knows it."""
    number = describe_worker("rq", worker.name, ",".join(worker.queue_names()))
    os.environ[_WORKER_VARIABLE] = number  # for work horses that are no forks


# RQ sets its variable before it starts a work horse. A work horse that imports this module is no
# fork of a worker that has a number.
if _VARIABLE_OF_RQ in os.environ:
    adopt_worker(os.environ.get(_WORKER_VARIABLE))

_is_loaded = False
_worker_pid = os.getpid()  # the process that imported this module; work horses are its forks
_known = 0  # how many modules the worker had at its last fork
# Shared with work horses: the length in bytes (0: none), then names of modules, one per line.
_noted = mmap.mmap(-1, 64 * 1024)
_LENGTH_BYTES = 4


def note_loaded() -> None:
    """Tell the worker which driver modules this work horse had to load."""
    if os.getpid() == _worker_pid:
        return
    new = [name for name in list(sys.modules)[_known:] if _is_shared(name)]
    text = "\n".join(new).encode()
    if not text or len(text) > len(_noted) - _LENGTH_BYTES:
        return
    _noted[_LENGTH_BYTES : _LENGTH_BYTES + len(text)] = text
    _noted[:_LENGTH_BYTES] = len(text).to_bytes(_LENGTH_BYTES)


def _load_noted() -> None:
    length = int.from_bytes(_noted[:_LENGTH_BYTES])
    names = _noted[_LENGTH_BYTES : _LENGTH_BYTES + length].decode().split()
    _noted[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)
    for name in filter(_is_shared, names):
        with contextlib.suppress(Exception):  # the work horse loads it instead
            importlib.import_module(name)


def _is_shared(name: str) -> bool:
    return name.partition(".")[0] in _SHARED_BY_HORSES


def _before_fork() -> None:
    global _known  # noqa: PLW0603  # once in a process, like modules
    worker = _forking_worker()
    if worker is None:
        return
    # The job raises its own error, which says more.
    with contextlib.suppress(ConfigurationError, LedgerUnavailableError):
        if not _is_loaded:
            describe(worker)
            load(worker.connection)
        else:
            _note_seen()
    _load_noted()
    _known = len(sys.modules)


def _forking_worker() -> Any:
    """Return the RQ worker that calls `os.fork()`, or None if other code does."""
    forking = sys._getframe(2)  # noqa: SLF001  # nothing else tells which code forks
    if str(forking.f_globals.get("__name__", "")).startswith("rq.worker"):
        return forking.f_locals.get("self")
    return None


if hasattr(os, "register_at_fork"):  # missing on platforms without fork
    os.register_at_fork(before=_before_fork)
