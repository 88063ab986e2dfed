"""`taskguard.connect()`: plain locks and guarded plain functions, without a queue.

Read next: `run/runner.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, cast

from taskguard import overrides
from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.errors import ConfigurationError
from taskguard.events import Events, Listener, log_event
from taskguard.guarded import GuardedFunction, prefix_of
from taskguard.keys import KeySpec, finish_key
from taskguard.locks.base import NO_LIMIT, Holder, LockProvider
from taskguard.model.delivery import Codec, Delivery, MessageRef
from taskguard.model.policy import MOST_S, OnLost, check_number, make_policy
from taskguard.periodic.leader import Leader
from taskguard.plain_calls import call, guarded, in_thread
from taskguard.run.encoding import JSON
from taskguard.run.lock import Lock
from taskguard.run.releasing import released
from taskguard.run.runner import Runner
from taskguard.run.watchdog import Watchdog
from taskguard.settings import (
    UNSET,
    make_formerly_namespaces,
    make_ledger,
    make_locks,
    make_namespace,
)

if TYPE_CHECKING:
    from taskguard.decorated import Decorator
    from taskguard.ledger.ports import DatabaseLedger
    from taskguard.operations import Operations
    from taskguard.options import CallOptions
    from taskguard.run.parking import Send

__all__ = ["TaskGuard", "connect"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def connect(
    *,
    locks: Any = UNSET,
    ledger: Any = UNSET,
    namespace: Any = UNSET,
    formerly_namespaces: Any = UNSET,
    listeners: Iterable[Listener] = (),
    codec: Codec = JSON,
    clock: Clock = SYSTEM_CLOCK,
) -> TaskGuard:
    """Return an object for locks and guarded functions, with a lock server and a ledger.

    Args:
        locks: a URL (`redis://…`, `valkey://…`, `memory://`, a database's, or `ledger://` for
            the ledger's own), a redis-py client or a provider; None: the ledger alone. By
            default the environment's TASKGUARD_LOCKS_URL.
        ledger: a SQLAlchemy URL, an Engine or a ledger. None: locks only, so that nothing refuses
            a stale write. By default the environment's TASKGUARD_LEDGER_URL.
        namespace: the prefix of this application's keys and work, so that several applications can
            share a ledger and a lock server. By default the environment's TASKGUARD_NAMESPACE, or
            "" if that is not set.
        formerly_namespaces: a list of this application's former namespaces; "" for none. Parked
            and overdue messages in these are sent into `namespace`. By default the environment's
            TASKGUARD_FORMERLY_NAMESPACES, separated by commas.
        listeners: called with every event. The default listener stays, which writes to the logger
            `taskguard`.
        codec: converts results to JSON text and back.
        clock: the clock, for tests.

    Raises:
        ConfigurationError: a setting is missing or wrong. The message says what to do, and never
            contains a password.
    """
    others = [each for each in listeners if each is not log_event]
    runtime = TaskGuard(
        locks=locks,
        ledger=ledger,
        namespace=namespace,
        formerly_namespaces=formerly_namespaces,
        events=Events(log_event, *others),
        codec=codec,
        clock=clock,
    )
    # Missing or wrong settings raise an error here.
    _ = runtime.runner, runtime.namespace, runtime.formerly_namespaces
    return runtime


def _checked_token(given: object) -> str:
    if not isinstance(given, str) or not given:
        raise ConfigurationError(f"lock(): token={given!r}: give a text, for example an id.")
    return given


class TaskGuard:
    """Plain locks and guarded functions. Made by `connect()`. Safe for threads and forks.

    Attributes:
        events: the events. Add listeners here.
        senders: how this process sends stored calls, by the name of their queue. An integration
            adds its own.
    """

    def __init__(
        self,
        *,
        locks: Any,
        ledger: Any,
        events: Events,
        codec: Codec,
        clock: Clock,
        namespace: Any = UNSET,
        formerly_namespaces: Any = UNSET,
    ) -> None:
        self.events = events
        self._namespace = namespace
        self._formerly_namespaces = formerly_namespaces
        self._locks = locks
        self._ledger = ledger
        self._codec = codec
        self._clock = clock
        self._runner: Runner | None = None
        self.senders: dict[str, Send] = {}

    @overrides.until_changed
    def runner(self) -> Runner:
        """The `Runner`, which runs deliveries. Raises ConfigurationError as `connect()` does."""
        by = overrides.now
        if by is not None:
            return self._runner_on(by)
        if self._runner is None:
            ledger = make_ledger(self._ledger)
            locks = make_locks(self._locks, ledger=ledger)
            self._runner = self._make(locks, ledger, self.events, self._clock)
        return self._runner

    @property
    def ledger(self) -> DatabaseLedger | None:
        """The ledger, a `SqlLedger` unless another one was given. None with locks only."""
        return cast("DatabaseLedger | None", self.runner.ledger)  # as it was made

    @functools.cached_property
    def namespace(self) -> str:
        """The namespace that this application's keys and work begin with, or "" if it has none."""
        return make_namespace(self._namespace)

    @functools.cached_property
    def formerly_namespaces(self) -> tuple[str, ...]:
        """The namespaces that this application had before, without the present one."""
        found = make_formerly_namespaces(self._formerly_namespaces)
        return tuple(each for each in found if each != self.namespace)

    def _runner_on(self, by: overrides.Overrides) -> Runner:
        events = Events(self.events.emit, by.listener)
        locks = None if self._locks is None else by.locks
        ledger = None if self._ledger is None else by.ledger
        return self._make(locks, ledger, events, by.clock or self._clock, renewing=by.renewing)

    def _make(
        self,
        locks: LockProvider | None,
        ledger: DatabaseLedger | None,
        events: Events,
        clock: Clock,
        *,
        renewing: bool = True,
    ) -> Runner:
        if locks is None and ledger is None:
            raise ConfigurationError(
                "locks=None and ledger=None: nothing would be guarded. Set one of them."
            )
        if locks is not None and ledger is None and not locks.traits.tokens:
            raise ConfigurationError(
                f"{locks!r} issues no fencing tokens, and ledger=None: nothing could refuse a "
                "stale write. Set a ledger, or use locks on a single server."
            )
        watchdog = Watchdog(
            locks=locks, ledger=ledger, events=events, clock=clock, threaded=renewing
        )
        return Runner(
            locks=locks,
            ledger=ledger,
            events=events,
            clock=clock,
            watchdog=watchdog,
            codec=self._codec,
        )

    def lock(
        self,
        *keys: str,
        ttl_s: float = 30.0,
        wait_s: float | None = 0.0,
        max_hold_s: float | None = None,
        limit: int | None = None,
        mode: Literal["write", "read"] = "write",
        token: str | None = None,
        on_lost: OnLost = "fence",
    ) -> Lock:
        """Return a lock on `keys`, for a `with` block, or to `acquire()` and `release()`.

        Its `Lease` is renewed as long as it is held.

        With `limit` or `mode="read"`, several holders share one key. A call with `limit` gets the
        key while fewer holders than that have it, whatever their limits. A reader gets it unless a
        holder has it alone. A call with neither has the key alone. The lock server grants shares,
        so they are as safe as with `ledger=None`. A ledger only says whether the key is paused.

        All holders that share a key have one `lease.fence`. It is higher than that of each holder
        that had the key alone before, and lower than that of each holder that has it after them.

        Args:
            keys: finished keys, as `taskguard.key()` makes them. All or none are taken.
            ttl_s: length of the lease in seconds. A dead holder's keys are free after it.
            wait_s: how long to wait for the keys, in seconds. By default not at all. None: without
                limit.
            max_hold_s: after how many seconds renewal stops. By default never.
            limit: how many holders may have the key at once, this one included. By default one.
            mode: "read" shares the key with all other readers. "write" has it alone.
            token: a text that owns the lease instead of the thread. Another thread or process makes
                a lock with it, to release or extend the lease. Each use needs a token of its own.
            on_lost: "interrupt" also raises LeaseLostError in a `with` block once the lease is
                lost, except under gevent. In an `async with` block it cancels the task, and the end
                of the block raises LeaseLostError. By default the block looks at `lease.lost`.

        Raises:
            ConfigurationError: an option is wrong, or the lock server has no shared locks.
        """
        if not keys:
            raise ConfigurationError('lock() needs a key, for example tg.lock("inventory:42").')
        most = 1 if limit is None and mode == "write" else self._limit(keys, limit, mode)
        longest_s = MOST_S if wait_s is None else wait_s
        options = {"ttl_s": ttl_s, "wait_s": longest_s, "max_hold_s": max_hold_s}
        busy = "wait" if longest_s else "raise"
        policy = make_policy(options, task="lock()", busy=busy, on_lost=on_lost)
        prefix = prefix_of(self.namespace)
        delivery = Delivery(
            keys=tuple(sorted({prefix + finish_key(key) for key in keys})),
            work=None,
            task="",
            message=MessageRef("" if token is None else _checked_token(token)),
            policy=policy,
            is_lock=True,
            limit=most,
        )
        _ = self.runner  # wrong settings raise an error here
        return Lock(lambda: self.runner.locking, delivery)

    def _limit(self, keys: Sequence[str], limit: int | None, mode: str) -> int:
        """Return the limit of holders with which `lock()` acquires. Raises ConfigurationError."""
        if mode not in ("write", "read"):
            raise ConfigurationError(f'lock(): mode={mode!r}: use "write" or "read".')
        if limit is not None:
            check_number("limit", limit, at_least=1, at_most=NO_LIMIT - 1, whole=True)
            if mode == "read":
                raise ConfigurationError(
                    f'lock(): limit={limit!r} and mode="read": limit={limit!r} alone already '
                    "lets that many readers share the key, without a writer. Remove mode=."
                )
        asked = limit or (NO_LIMIT if mode == "read" else 1)
        if asked == 1:
            return asked
        what = 'mode="read"' if mode == "read" else f"limit={limit!r}"
        if len(set(keys)) > 1:
            raise ConfigurationError(
                f"lock(): {what} with {len(set(keys))} keys: holders can share a single key only. "
                "Nest one lock() for each key, everywhere in the same order."
            )
        locks = self.runner.locks
        if locks is None or not locks.traits.shares:
            found = "there is no lock server" if locks is None else f"{locks!r} has none"
            raise ConfigurationError(
                f"lock(): {what} needs locks that several holders can share, and {found}. Set "
                "locks= to Redis or Valkey, with or without Sentinel or Cluster. A lock table in "
                "PostgreSQL, MariaDB or MySQL works, too: ledger:// is in the ledger's database."
            )
        return asked

    def leader(self, name: str, *, ttl_s: float = 15.0, on_lost: OnLost = "interrupt") -> Leader:
        """Return a candidate for the lease `name`, which one leader at a time holds.

        `tg.leader("beat").run(work)` runs `work(leadership)` while this process leads.

        Args:
            name: the name of the lease, the same for all candidates.
            ttl_s: length of the lease in seconds, renewed at a third of it. If a leader dies,
                another process leads within this time and a second.
            on_lost: "interrupt" by default. It raises LeaseLostError in the work's thread when the
                work must stop, except under gevent. With "fence" the work itself has to check
                `leadership.lost`.
        """
        return Leader(self, name, ttl_s=ttl_s, on_lost=on_lost)

    def guarded(
        self,
        *,
        key: KeySpec,
        **options: Unpack[CallOptions],
    ) -> Decorator:
        """Guard a plain function, or a coroutine function (`async def`), which stays one.

        A call whose work is done returns the stored result. A call whose key is taken raises
        KeyBusyError: at once, or with `busy="wait"` after `wait_s`. To call a plain function from a
        coroutine, see `arun()`.

        Args:
            key: the key template, for example "report:<day>", a list of them, or a callable.
            options: the options of the guard; docs/reference/options.md has each of them.

        Raises:
            ConfigurationError: an option is wrong. No queue can send a plain call again later, so
                other values of `busy` than "raise" and "wait" are refused.
            KeyTemplateError: a template does not fit the function's parameters.
        """
        busy = options.setdefault("busy", "raise")
        if busy not in ("raise", "wait"):
            raise ConfigurationError(
                f'busy={busy!r}: no queue can send a plain call again later. Use "raise" or "wait".'
            )

        return cast("Decorator", lambda function: guarded(self, function, key, options))

    async def arun(
        self, function: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """Run a plain guarded function in a thread, so that the event loop of the caller goes on.

        Unlike `asyncio.to_thread()` it has as many threads as calls, so calls that wait for their
        keys keep no other call waiting. If the caller is cancelled, the function goes on.

        Args:
            function: the guarded function. An `async def` is awaited without this.
            args: its arguments by position.
            kwargs: its arguments by keyword.
        """
        return await in_thread(function, args, kwargs)

    def run(
        self,
        compiled: GuardedFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        task: str | None = None,
    ) -> Any:
        """Run a guarded function as a plain call, which cannot be deferred.

        Args:
            compiled: the function.
            args: its arguments by position. The guard is not among them.
            kwargs: its arguments by keyword.
            task: the name under which a queue knows it. A call and a message are then the same
                work. By default the function's own name.

        Returns:
            The result of the body, or the stored result if the work was done before.

        Raises:
            KeyBusyError: the key is taken.
            Exception: what `Runner.deliver()` raises.
        """
        return call(self, compiled, args, kwargs, task=task)

    def release(
        self,
        key: str,
        *,
        reason: str | None = None,
        actor: str | None = None,
        fence: int | None = None,
        owner: str | None = None,
    ) -> bool:
        """Take a key from a holder that is known to be gone, before its lease has run out.

        For an operator. The lease is ended in the ledger, then at the lock server, each by a
        statement that names its owner: a holder that came meanwhile keeps the key.

        A holder that is still alive learns of this at its next renewal, within a third of its
        `ttl_s`. With a ledger, its late commit is refused, and its delivery is repeated. The next
        delivery is a takeover, which counts towards `max_crashes`. With locks only, both may work
        at the same time until that renewal.

        Args:
            key: the key, as `lock()` takes it or as errors show it. It may lack this application's
                namespace.
            reason: why, for the log and the record.
            actor: the operator's name. By default the user and the host of this process.
            fence: the holder's fence. Its lease, its guard and the ledger have it.
            owner: the holder, as `KeyBusyError.owner` names it, or the part of that before /.

        Without `fence` and `owner` the key is taken from all its holders: several may share a key,
        or hold its slots. With a ledger, a holder loses all keys of its claim.

        Returns:
            False if no such holder was found.

        Raises:
            ConfigurationError: the locks are advisory ones, which only their own session releases.
            LockServerUnavailableError: with locks only, if the lock server gave no answer.
        """
        return bool(self.released(key, reason=reason, actor=actor, fence=fence, owner=owner))

    def released(
        self,
        key: str,
        *,
        reason: str | None = None,
        actor: str | None = None,
        fence: int | None = None,
        owner: str | None = None,
    ) -> list[Holder]:
        """Release a key as `release()` does, and return the holders that it was taken from."""
        prefix, ledger = prefix_of(self.namespace), self.ledger
        found = released(
            key,
            prefix=prefix,
            locks=self.runner.locks,
            ledger=ledger,
            reason=reason,
            actor=actor,
            fence=fence,
            owner=owner,
        )
        for each in found:
            self.operations.goes_on(each.key)
        return found

    @property
    def operations(self) -> Operations:
        """An operator's questions, and changes that are recorded. They need a ledger."""
        from taskguard.operations import Operations  # not for deliveries

        return Operations(self.runner, namespace=prefix_of(self.namespace), senders=self.senders)

    def close(self) -> None:
        """Send what was counted, and close the connections of the lock provider and the ledger."""
        if self._runner is None:
            return
        self._runner.counting.flush.last()
        for part in (self._runner.locks, self.ledger):
            if part is not None:
                part.close()
