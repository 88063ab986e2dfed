"""A forked process that is killed around one of its statements, selected by its number."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from pytest_taskguard.crashes import kill_process
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.libpq import Libpq

__all__ = ["KillAt", "was_killed"]


def was_killed(run: Callable[[], None]) -> bool:
    """Run it in a child without open connections. Return whether it killed itself."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:  # the child must not return into the parent's stack
            traceback.print_exc()
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


class KillAt:
    """Sends SIGKILL at boundary number `at`: around each statement and before each COMMIT.

    Statements through libpq have one more boundary, between sending and waiting for the answer.

    `statements`: False counts only what commits, before and after it.

    For a child alone: it counts calls past SQLAlchemy, to the driver itself, of all ledgers.
    """

    def __init__(self, engine: sa.Engine, at: int, *, statements: bool = True) -> None:
        self._left = at
        # Not by a listener: if one exists, COMMIT is not sent in one message with the completion.
        dialect: Any = engine.dialect
        watch = self.sent if statements else self.around
        dialect.do_commit = watch(dialect.do_commit)
        names = ["ask", "ask_and_commit", "ask_apart"]
        if statements:
            names += ["ask_in", "read"]
            for event in ("before_cursor_execute", "after_cursor_execute"):
                sa.event.listen(engine, event, self.count)
        for name in names:
            setattr(Database, name, self.around(getattr(Database, name)))
        for name in ("_rows", "_both"):
            setattr(Libpq, name, self.sent(getattr(Libpq, name)))

    def count(self, *_: Any) -> None:
        """Count one boundary."""
        self._left -= 1
        if self._left == 0:
            kill_process()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a boundary before it and one after."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count()
            found = function(*args, **kwargs)
            self.count()
            return found

        return counted

    def sent(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that commits or waits for an answer, with a boundary before it."""

        def counted(*args: Any) -> Any:
            self.count()
            return wait(*args)

        return counted
