"""What guards need is loaded by the worker, once, and not by each of its work horses.

`GuardedWorker` does so when it starts. A stock worker is caught at its first fork, if it has loaded
a guarded job's module by then: without that each job loads drivers for a quarter of a second.

A newer redis-py looks in the file system for its own version whenever it makes a connection: a
tenth of the processor time of a short job, which makes two for RQ. The worker's client is told it.

Guarantees: nothing is loaded in a process that does not fork as an RQ worker does, and no
connection is open at the fork. Does not help where the worker has not loaded the jobs' module: then
each work horse loads that, and all that it imports.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from taskguard.errors import ConfigurationError, LedgerUnavailableError
from taskguard_rq.runtime import runtime

__all__ = ["load", "tell_version"]

# What a user may have said of it; as any of them is there, nothing is to be looked up.
_SAID = frozenset({"driver_info", "lib_name", "lib_version"})


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


def _before_fork() -> None:
    worker = None if _is_loaded else _forking_worker()
    if worker is not None:
        # What is wrong is the job's error, which says more.
        with contextlib.suppress(ConfigurationError, LedgerUnavailableError):
            load(worker.connection)


def _forking_worker() -> Any:
    """RQ's worker that calls `os.fork()`, if it is one; schedulers and others fork elsewhere."""
    forking = sys._getframe(2)  # noqa: SLF001  # no other way says who forks
    if str(forking.f_globals.get("__name__", "")).startswith("rq.worker"):
        return forking.f_locals.get("self")
    return None


if hasattr(os, "register_at_fork"):  # not where there are no forks
    os.register_at_fork(before=_before_fork)
