"""A job's body as RQ runs it: what it returns may be a coroutine, or RQ's `Retry`.

A body that returns `Retry` asks for another execution, and has not done its work.

Guarantees: such a body ends as one that raises does: what it wrote in an open transaction is rolled
back, the attempt is FAILED, and the next one is a later delivery of the same message. RQ is
handed the `Retry` and counts it; a job that asked too often is FAILED for RQ and in the ledger.

Where DONE was committed before, it stays: the next execution is answered from the record, and the
log says that the body asked in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rq import Retry

from taskguard import Guard
from taskguard.errors import ConfigurationError
from taskguard.integration import GuardedFunction
from taskguard_rq.coroutines import loop_runs_here, run_body

__all__ = ["GuardedJobFunction", "RetryReturnedError"]

logger = logging.getLogger("taskguard")


class RetryReturnedError(Exception):
    """The body returned `Retry`. Never leaves `@guarded_job`.

    Attributes:
        retry: the `Retry` that the body returned.
    """

    def __init__(self, retry: Retry) -> None:
        # This text is the work's error in the ledger. Until RQ 3 a Retry had no repr() of its own.
        super().__init__(f"Retry(max={retry.max}, interval={retry.intervals})")
        self.retry = retry


class GuardedJobFunction(GuardedFunction):
    """A job's function, whose `Retry` is no result, and whose coroutine is awaited."""

    awaits = True

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], guard: Guard) -> Any:
        """As for every guarded function. Raises RetryReturnedError for a `Retry`."""
        value = super().call(args, kwargs, guard)
        if not isinstance(value, Retry):
            return value
        if guard.completed:
            logger.warning(
                "%s %s returned Retry after DONE was committed: its work will not be done again. "
                "Return Retry before guard.transaction(), or commit parts with "
                "guard.checkpoint(progress).",
                self.name,
                guard.key,
            )
        raise RetryReturnedError(value)

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any], guard: Guard) -> Any:
        """Await what a job's function returns in an event loop, as RQ does."""
        if loop_runs_here():
            # A coroutine function goes to a thread: this one was none by its looks.
            coroutine.close()
            raise ConfigurationError(
                f"{self.name} is a plain function that returns a coroutine, and was called where "
                "an event loop runs. Nothing of it was run. Let the decorator under @guarded_job "
                "be an `async def` that awaits it."
            )
        return run_body(coroutine, guard)
