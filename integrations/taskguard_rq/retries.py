"""A body that returns RQ's `Retry` asks for another execution, and has not done its work.

Guarantees: it ends as a body that raises does: what it wrote in an open transaction is rolled
back, the attempt is FAILED, and the next one is a later delivery of the same message. RQ is
handed the `Retry` and counts it; a job that asked too often is FAILED for RQ and in the ledger.

Where DONE was committed before, it stays: the next execution is answered from the record, and the
log says that the body asked in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rq import Retry

from taskguard import Guard, GuardedFunction

__all__ = ["GuardedJobFunction", "RetryReturnedError"]

logger = logging.getLogger("taskguard")


class RetryReturnedError(Exception):
    """The body returned `Retry`. Never leaves `@guarded_job`.

    Attributes:
        retry: what it returned.
    """

    def __init__(self, retry: Retry) -> None:
        # Stands in the ledger as the work's error. Until RQ 3 a Retry had no repr() of its own.
        super().__init__(f"Retry(max={retry.max}, interval={retry.intervals})")
        self.retry = retry


class GuardedJobFunction(GuardedFunction):
    """A job's function, whose `Retry` is no result."""

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
