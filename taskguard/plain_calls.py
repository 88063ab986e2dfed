"""Calls of guarded functions without a queue, by plain programs and by coroutines.

Guarantees: a call is a delivery of its own, which cannot be deferred. A guarded coroutine function
stays one: its body runs in the event loop of its caller, and its delivery in a thread.

Read next: `run/runner.py`, `run/beside.py`.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from taskguard.errors import KeyBusyError
from taskguard.guarded import AwaitedFunction, GuardedFunction
from taskguard.keys import KeySpec
from taskguard.model.delivery import Answered, Completed, Delivery, MessageRef
from taskguard.run.current import for_caller
from taskguard.run.waiting import Waiting

if TYPE_CHECKING:
    from taskguard.run.runner import Runner

__all__ = ["call", "guarded", "in_thread"]

_Result = TypeVar("_Result")


class _Calls:
    """Unique names for plain calls: a random part for the process, then a counter."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self._process = os.urandom(12).hex()
        self._numbers = itertools.count()

    def __call__(self) -> str:
        return f"{self._process}-{next(self._numbers)}"


_call_id = _Calls()


class Runtime(Protocol):
    """The members of a `TaskGuard` that a call uses. Tests may replace the runner."""

    @property
    def namespace(self) -> str:
        """Return what the application's keys begin with."""
        ...

    @property
    def runner(self) -> Runner:
        """Return the runner of the call."""
        ...


def guarded(
    runtime: Runtime, function: Callable[..., Any], key: KeySpec, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the guarded function. It is a coroutine function if the given one is."""
    if iscoroutinefunction(function):
        awaited = AwaitedFunction(function, key=key, **options)

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _await(runtime, awaited, args, kwargs)

        return _like(awaited, wrapper)
    compiled = GuardedFunction(function, key=key, **options)
    return _like(compiled, lambda *args, **kwargs: call(runtime, compiled, args, kwargs))


def _like(compiled: GuardedFunction, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(wrapper, compiled.function)
    wrapper.__signature__ = compiled.signature  # type: ignore[attr-defined]
    return wrapper


def call(
    runtime: Runtime,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    task: str | None = None,
) -> Any:
    """Run a compiled function: `TaskGuard.run()`."""
    delivery = _delivery(runtime, compiled, args, kwargs, task=task)
    return _deliver(runtime, compiled, delivery, args, kwargs)


async def _await(
    runtime: Runtime, compiled: AwaitedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from taskguard.run import beside  # it loads asyncio

    delivery = _delivery(runtime, compiled, args, kwargs)
    waiting = Waiting(compiled.policy.waits_up_to_s)
    locking = runtime.runner.locking

    def give_up() -> None:
        if waiting.give_up():
            locking.stop_waiting(delivery, waiting)

    return await beside.deliver(
        lambda: _deliver(runtime, compiled, delivery, args, kwargs, waiting), give_up
    )


async def in_thread(
    function: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Result:
    """Call a plain function in a thread: `TaskGuard.arun()`."""
    from taskguard.run import beside  # it loads asyncio

    if iscoroutinefunction(function):
        raise TypeError(f"arun({function!r}): it is async, so await it without arun().")
    context = for_caller()
    return await beside.run(lambda: context.run(function, *args, **kwargs))


def _delivery(
    runtime: Runtime,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    task: str | None = None,
) -> Delivery:
    message = MessageRef(_call_id())
    return compiled.delivery(args, kwargs, namespace=runtime.namespace, task=task, message=message)


def _deliver(
    runtime: Runtime,
    compiled: GuardedFunction,
    delivery: Delivery,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    waiting: Waiting | None = None,
) -> Any:
    outcome = runtime.runner.deliver(
        delivery, lambda guard: compiled.call(args, kwargs, guard), waiting=waiting
    )
    if isinstance(outcome, Completed | Answered):
        return outcome.value
    raise KeyBusyError(f"{delivery.key} is busy.", key=delivery.key)
