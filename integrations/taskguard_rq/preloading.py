"""What guards need is loaded by the worker, once, and not by each of its work horses.

`GuardedWorker` does so when it starts. A stock worker is caught at its first fork, if it has loaded
a guarded job's module by then: without that each job loads drivers for a quarter of a second.

Guarantees: nothing is loaded in a process that does not fork as an RQ worker does, and no
connection is open at the fork. Does not help where the worker has not loaded the jobs' module: then
each work horse loads that, and all that it imports.
"""

from __future__ import annotations

import contextlib
import os
import sys

from taskguard.errors import ConfigurationError, LedgerUnavailableError
from taskguard_rq.runtime import runtime

__all__ = ["load"]


def load() -> None:
    """Load drivers, and look at the ledger's tables by connections that are closed again.

    Raises:
        ConfigurationError: a setting, or the tables, are not as they have to be.
        LedgerUnavailableError: the ledger gives no answer.
    """
    global _is_loaded  # noqa: PLW0603  # as modules are, once in a process
    _is_loaded = True
    ledger = runtime().ledger
    if ledger is None:
        return
    try:
        ledger.check_schema()
    finally:
        ledger.close()


_is_loaded = False


def _before_fork() -> None:
    if not _is_loaded and _forks_as_worker():
        # What is wrong is the job's error, which says more.
        with contextlib.suppress(ConfigurationError, LedgerUnavailableError):
            load()


def _forks_as_worker() -> bool:
    """Whether it is RQ's worker that calls `os.fork()`; schedulers and others fork elsewhere."""
    forking = sys._getframe(2)  # noqa: SLF001  # no other way says who forks
    return str(forking.f_globals.get("__name__", "")).startswith("rq.worker")


if hasattr(os, "register_at_fork"):  # not where there are no forks
    os.register_at_fork(before=_before_fork)
