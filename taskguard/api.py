"""`taskguard.connect()`: plain locks and guarded plain functions, without a queue.

Read next: `runner.py`.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.delivery import Answered, Codec, Completed, Delivery, MessageRef
from taskguard.errors import ConfigurationError, KeyBusyError
from taskguard.events import Events, Listener, log_event
from taskguard.guard import JSON
from taskguard.guarded import GuardedFunction
from taskguard.keys import finish_key
from taskguard.lease import Lease
from taskguard.policy import make_policy
from taskguard.runner import Runner
from taskguard.settings import UNSET, make_ledger, make_locks

__all__ = ["TaskGuard", "connect"]

Function = TypeVar("Function", bound=Callable[..., Any])


def connect(
    *,
    locks: Any = UNSET,
    ledger: Any = UNSET,
    listeners: tuple[Listener, ...] = (log_event,),
    codec: Codec = JSON,
    clock: Clock = SYSTEM_CLOCK,
) -> TaskGuard:
    """Locks and guarded functions on a lock server and a ledger.

    Args:
        locks: a URL (`redis://…`, `valkey://…`, `memory://`), a redis-py client or a provider;
            None: the ledger alone. By default the environment's TASKGUARD_LOCKS_URL.
        ledger: a SQLAlchemy URL, an Engine or a ledger; None: locks only, nothing refuses a
            stale write. By default the environment's TASKGUARD_LEDGER_URL.
        listeners: called with every event; by default one that logs.
        codec: how results become JSON.
        clock: time, for tests.

    Raises:
        ConfigurationError: what is missing or wrong, and what to do; never with a password.
    """
    made_locks, made_ledger = make_locks(locks), make_ledger(ledger)
    if made_locks is None and made_ledger is None:
        raise ConfigurationError("locks=None and ledger=None: nothing would be guarded.")
    runner = Runner(
        locks=made_locks,
        ledger=made_ledger,
        events=Events(*listeners),
        codec=codec,
        clock=clock,
    )
    return TaskGuard(runner)


class _Calls:
    """Names for plain calls, unlike any other's: random by process, counted within it."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self._process = os.urandom(12).hex()
        self._numbers = itertools.count()

    def __call__(self) -> str:
        return f"{self._process}-{next(self._numbers)}"


_call_id = _Calls()


class TaskGuard:
    """Plain locks and guarded functions. Thread-safe; usable again in a forked child.

    Attributes:
        runner: runs deliveries; for integrations.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def events(self) -> Events:
        """Where listeners are added."""
        return self.runner.events

    def lock(
        self,
        *keys: str,
        ttl_s: float = 30.0,
        wait_s: float = 0.0,
        max_hold_s: float | None = None,
    ) -> AbstractContextManager[Lease]:
        """A lease on `keys` for the time of a `with` block, renewed while it lasts.

        Args:
            keys: finished keys, as `taskguard.key()` makes them; all or none are taken.
            ttl_s: length of the lease in seconds; a dead holder's keys are free after it.
            wait_s: how long to wait for the keys, in seconds.
            max_hold_s: renewal stops after so many seconds.

        Raises:
            KeyBusyError: on entering, when the keys are taken for longer than `wait_s`.
            KeyAlreadyHeldError: this thread's own guarded body holds one of them.
        """
        if not keys:
            raise ConfigurationError('lock() needs a key, for example tg.lock("inventory:42").')
        options = {"ttl_s": ttl_s, "wait_s": wait_s, "max_hold_s": max_hold_s}
        policy = make_policy(options, task="lock()", busy="wait" if wait_s else "raise")
        delivery = Delivery(
            keys=tuple(sorted({finish_key(key) for key in keys})),
            work=None,
            task="",
            message=MessageRef(""),
            policy=policy,
        )
        return self.runner.hold(delivery)

    def guarded(
        self,
        *,
        key: Any,
        once_per: str = "key",
        work: str | None = None,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Guard a plain function: options as for `guarded_task`, with `busy="raise"`.

        A call whose work is done returns the stored result; one that finds the key taken raises
        KeyBusyError (with `busy="wait"`, after `wait_s`). A plain call cannot be put off, so
        `busy="retry"` and `busy="skip"` are refused.
        """
        if options.get("busy", "raise") not in ("raise", "wait"):
            raise ConfigurationError(
                f"busy={options['busy']!r}: a plain function has no queue to be put off to; use "
                '"raise" or "wait".'
            )

        def decorate(function: Function) -> Function:
            compiled = GuardedFunction(
                function, key=key, once_per=once_per, work=work, options=options, busy="raise"
            )

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return self.run(compiled, args, kwargs)

            wrapper.__signature__ = compiled.signature  # type: ignore[attr-defined]
            return wrapper  # type: ignore[return-value]

        return decorate

    def run(
        self,
        compiled: GuardedFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        task: str | None = None,
    ) -> Any:
        """Run a compiled function as a plain call: a message of its own, nothing to put off to.

        `task` is the name under which a queue knows it, so that a call and a message are the same
        work; by default the function's own.
        """
        message = MessageRef(_call_id())
        delivery = compiled.delivery(args, kwargs, task=task, message=message)
        outcome = self.runner.deliver(delivery, lambda guard: compiled.call(args, kwargs, guard))
        if isinstance(outcome, Completed | Answered):
            return outcome.value
        raise KeyBusyError(f"{delivery.key} is busy.", key=delivery.key)

    def close(self) -> None:
        """Close the connections of the lock provider and the ledger."""
        for part in (self.runner.locks, self.runner.ledger):
            if part is not None:
                part.close()
