"""What guards need is loaded by the worker, once, and not by each of its work horses.

`GuardedWorker` does so when it starts, if its environment says where locks and ledger are. A stock
worker does so at its first fork, if it has loaded a guarded job's module. If only the horse loads
the module that says so, the horse writes down which modules of drivers it had to load, and the
worker loads them before its next fork. Without any of that each job loads drivers for 0.2 s.

A newer redis-py looks in the file system for its own version whenever it makes a connection: a
tenth of the processor time of a short job, which makes two for RQ. The worker's client is told it.

Guarantees: nothing is loaded in a process that does not fork as an RQ worker does, and no
connection is open at the fork. A user's own modules are not loaded by the worker: each work horse
loads the jobs' module, and what that imports, unless the worker has loaded it by `-c`.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import sys
from typing import Any

from taskguard.errors import ConfigurationError, LedgerUnavailableError
from taskguard_rq.runtime import runtime

__all__ = ["load", "note_loaded", "tell_version"]

# What a user may have said of it; as any of them is there, nothing is to be looked up.
_SAID = frozenset({"driver_info", "lib_name", "lib_version"})
# Loading them again in the worker opens no connection and starts no thread.
_SHARED_BY_HORSES = frozenset(
    {"kazoo", "MySQLdb", "psycopg", "psycopg2", "psycopg_binary", "psycopg_c", "pymysql", "redis"}
    | {"sqlalchemy", "sqlite3", "taskguard", "taskguard_rq"}
    | {"taskguard_consul", "taskguard_etcd", "taskguard_zookeeper", "urllib3"}
)


def load(queue_server: Any) -> None:
    """Load drivers, and look at the ledger's tables by connections that are closed again.

    Args:
        queue_server: the worker's client of redis-py, whose later connections know its version.

    Raises:
        ConfigurationError: a setting, or the tables, are not as they have to be.
        LedgerUnavailableError: the ledger gives no answer.
    """
    global _is_loaded  # noqa: PLW0603  # as modules are, once in a process
    _is_loaded = True
    tell_version(queue_server)
    ledger = runtime().ledger
    if ledger is None:
        return
    try:
        ledger.check_schema()
    finally:
        ledger.close()


def tell_version(queue_server: Any) -> None:
    """Let the client's connections know the version of redis-py, unless its user said something."""
    try:
        from redis import DriverInfo
    except ImportError:  # an older one, which looked when it was imported
        return
    pool = queue_server.connection_pool
    options: dict[str, Any] = pool.connection_kwargs
    by_redis_py = pool.connection_class.__module__.startswith("redis.")  # others may not take it
    if by_redis_py and not _SAID & options.keys():
        options["driver_info"] = DriverInfo()


_is_loaded = False
_worker_pid = os.getpid()  # of the process that loaded this module, of which horses are forks
_known = 0  # how many modules the worker had at its last fork
# Names of modules, one a line, after their length in bytes; 0: there is nothing to load.
_noted = mmap.mmap(-1, 64 * 1024)
_LENGTH_BYTES = 4


def note_loaded() -> None:
    """Tell the worker which modules of drivers this work horse had to load."""
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
        with contextlib.suppress(Exception):  # the horse has it all the same
            importlib.import_module(name)


def _is_shared(name: str) -> bool:
    return name.partition(".")[0] in _SHARED_BY_HORSES


def _before_fork() -> None:
    global _known  # noqa: PLW0603  # as modules are, once in a process
    worker = _forking_worker()
    if worker is None:
        return
    if not _is_loaded:
        # What is wrong is the job's error, which says more.
        with contextlib.suppress(ConfigurationError, LedgerUnavailableError):
            load(worker.connection)
    _load_noted()
    _known = len(sys.modules)


def _forking_worker() -> Any:
    """RQ's worker that calls `os.fork()`, if it is one; schedulers and others fork elsewhere."""
    forking = sys._getframe(2)  # noqa: SLF001  # no other way says who forks
    if str(forking.f_globals.get("__name__", "")).startswith("rq.worker"):
        return forking.f_locals.get("self")
    return None


if hasattr(os, "register_at_fork"):  # not where there are no forks
    os.register_at_fork(before=_before_fork)
