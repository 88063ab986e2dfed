"""Log a starting worker's number, and each finding once, in one line with its name.

Notes are logged at DEBUG, other findings at WARNING.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from taskguard.doctor.merging import merged
from taskguard.findings import Finding, Level
from taskguard.model.workers import nonces

__all__ = ["log_findings", "log_process"]

logger = logging.getLogger("taskguard")


def log_process() -> None:
    """Log the number in the owners of this worker, and its name."""
    this = nonces.worker()
    logger.info(
        "worker %s is %s, pid %d on %s, with all processes that it forks",
        this.number,
        this.name,
        this.pid,
        this.host,
    )


def log_findings(found: Iterable[Finding], *, but: Collection[str] = ()) -> None:
    """Log findings as warnings, and notes at level DEBUG.

    Args:
        found: the findings of all reports.
        but: names of findings that another line reports. None by default.
    """
    for finding in merged(each for each in found if each.name not in but):
        level = logging.DEBUG if finding.level is Level.NOTE else logging.WARNING
        logger.log(level, "%s (finding %s)", finding, finding.name)
