"""Run a job's body as RQ does: await a coroutine, and pass on RQ's `Retry`.

A body that returns `Retry` requests another execution. Its work is not done.

Guarantees: such a body ends like a body that raises. Its open transaction is rolled back, and its
attempt has failed. The next attempt is a later delivery of the message. RQ gets the `Retry` and
counts it. After too many, the job is FAILED in RQ and in the ledger.

If the body committed DONE before, it stays DONE: the next execution is answered from the record,
and taskguard logs a warning.
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
    """A job's function. A returned `Retry` is not its result, and a coroutine is awaited."""

    awaits = True

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], guard: Guard) -> Any:
        """Run the body and return its value. Raises RetryReturnedError for a `Retry`."""
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
        """Await the body's coroutine in an event loop, as RQ does."""
        if loop_runs_here():
            # A coroutine function runs in a thread. This one was not recognizable as one.
            coroutine.close()
            raise ConfigurationError(
                f"{self.name} is a plain function that returns a coroutine, and was called where "
                "an event loop runs. The coroutine did not run. Make the function under "
                "@guarded_job an `async def` that awaits it."
            )
        return run_body(coroutine, guard)
