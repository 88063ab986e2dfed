"""The common parts of questions and changes: the ledger, the lock server and the namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from taskguard.errors import ConfigurationError

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger
    from taskguard.run.runner import Runner

__all__ = ["Base"]


class Base:
    """The parts that operators ask and change.

    Args:
        runner: its lock server and its ledger.
        namespace: the prefix of this application's keys and work, with its colon. "": none.
    """

    def __init__(self, runner: Runner, *, namespace: str = "") -> None:
        self._runner = runner
        self._namespace = namespace

    @property
    def _ledger(self) -> DatabaseLedger:
        """The ledger. Raises ConfigurationError with locks only."""
        if self._runner.ledger is None:
            raise ConfigurationError(
                "ledger=None: without a ledger there are no records to read or change. Set a "
                "ledger, or use tg.release() to release a key at the lock server."
            )
        return cast("DatabaseLedger", self._runner.ledger)
