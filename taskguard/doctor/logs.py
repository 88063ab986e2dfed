"""What is found when a worker starts, for its log.

Guarantees: one line each, with the finding's name, by which the documentation has it; a note is for
debugging. What gives no answer is told in the words of what comes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from platform import node

from taskguard.findings import Finding, Level
from taskguard.model.lease import new_owner

__all__ = ["log_findings", "log_process"]

logger = logging.getLogger("taskguard")


def log_process() -> None:
    """Log the number by which errors and log lines name this worker."""
    number, pid = new_owner().named
    logger.info("worker %s is pid %d on %s, with all processes that it forks", number, pid, node())


def log_findings(found: Iterable[Finding], *, but: Collection[str] = ()) -> None:
    """Log them, except those of the names in `but`, which are said elsewhere."""
    for finding in found:
        if finding.name in but:
            continue
        if finding.name == "lock_server_away":
            logger.warning("the lock server is away; until it answers: %s", finding.what)
        elif finding.name == "ledger_away":
            logger.warning("the ledger is away; deliveries will be put off: %s", finding.what)
        elif finding.level is Level.NOTE:
            logger.debug("%s (finding %s)", finding, finding.name)
        else:
            logger.warning("%s (finding %s)", finding, finding.name)
