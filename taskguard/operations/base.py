"""The common parts of questions and changes: the ledger, the lock server and the namespace.

Guarantees: after a change that frees a key, the next message of its line is sent from here, if this
process knows how to send it. Otherwise a relay sends it within a second.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from taskguard.errors import ConfigurationError, TaskguardError
from taskguard.keys import MAX_KEY_BYTES, finish_key
from taskguard.model.bounds import MOST_SLOTS, without_slot
from taskguard.model.changes import Said, said, this_user
from taskguard.model.history import Action
from taskguard.run.parking import AHEAD_S, promote_next

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger
    from taskguard.run.parking import Send
    from taskguard.run.runner import Runner

__all__ = ["Base", "logger"]

logger = logging.getLogger("taskguard")

# Keys contain no blanks and no braces, and each % begins an escape.
_is_key = re.compile(r"(?:[^%\s{}]|%[0-9A-F]{2})+").fullmatch


class Base:
    """The parts that operators ask and change.

    Args:
        runner: its lock server and its ledger.
        namespace: the prefix of this application's keys and work, with its colon. "": none.
        senders: how this process sends stored calls, by the name of their queue.
    """

    def __init__(
        self, runner: Runner, *, namespace: str = "", senders: Mapping[str, Send] | None = None
    ) -> None:
        self._runner = runner
        self._namespace = namespace
        self._senders = senders or {}

    @property
    def _ledger(self) -> DatabaseLedger:
        """The ledger. Raises ConfigurationError with locks only."""
        if self._runner.ledger is None:
            raise ConfigurationError(
                "ledger=None: without a ledger there are no records to read or change. Set a "
                "ledger, or use tg.release() to release a key at the lock server."
            )
        return cast("DatabaseLedger", self._runner.ledger)

    @staticmethod
    def _said(action: Action, actor: str | None, reason: str) -> Said:
        return said(action, this_user() if actor is None else actor, reason)

    def _keys(self, key: str, what: str) -> list[str]:
        """Return the keys that a text may mean, with this application's namespace.

        It may be a key as errors show it: escaped, except for the literal text of its template. Or
        it may be a text as `lock()` takes it, which escapes it.
        """
        if not key:
            raise ConfigurationError(f'{what} needs a key, for example "inventory:42".')
        own = key.removeprefix(self._namespace)
        shown = [own] if _is_key(own) and len(own.encode()) <= MAX_KEY_BYTES else []
        if shown and "%" in own:
            return [self._namespace + own]
        return [self._namespace + each for each in dict.fromkeys((*shown, finish_key(own)))]

    def _on_record(self, keys: list[str]) -> str:
        """Return the first of these keys that is on record, or else the last one."""
        known = (each for each in keys if each == keys[-1] or self._ledger.key_view(each))
        return next(known)

    def goes_on(self, key: str) -> None:
        """Send the next message of a line whose key may be free. Never raises."""
        if not self._senders or not key or self._runner.ledger is None:
            return
        ledger, events, app = self._ledger, self._runner.events, self._namespace.removesuffix(":")
        options: dict[str, Any] = {"app": app, "ahead_s": AHEAD_S, "most": MOST_SLOTS}
        try:
            for line in dict.fromkeys((key, without_slot(key))):
                promote_next(ledger, line, self._senders, events, **options)
        except TaskguardError as error:
            logger.debug("%s: whether a message waits got no answer: %s", key, error)
