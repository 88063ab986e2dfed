"""A guarded function and its options, compiled once: makes keys, work ids and deliveries.

Every decorator of taskguard uses it: for Celery, RQ and plain functions.

Guarantees: templates and options are checked here, at decoration. `signature` is the wrapped
function's signature without `guard`, for queues that check arguments before publishing.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from taskguard.combinations import refusal
from taskguard.errors import ConfigurationError, KeyArgumentError
from taskguard.keys import SHORT_CHARS, KeyCallable, KeyFunction, KeySpec, compile_key, shorten
from taskguard.model.bounds import Bounds
from taskguard.model.delivery import Delivery, MessageRef, Parking, Queue, stored_call
from taskguard.model.former import Former, formers_in
from taskguard.model.policy import OncePer, Policy, make_policy
from taskguard.run.guard import Guard, attempt_of
from taskguard.values import value

if TYPE_CHECKING:
    from taskguard.ledger.own_rows.guarded_row import GuardedRow, RowId

__all__ = ["GUARD_PARAMETER", "AwaitedFunction", "GuardedFunction", "prefix_of", "work_id"]

GUARD_PARAMETER = "guard"
_ONCE_PER = get_args(OncePer)
_NOT_RUN = (GeneratorType, AsyncGeneratorType)
# With a message's id it is in one index, which on MariaDB and MySQL holds 768 characters. The id of
# a run is 41 characters longer.
_MOST_WORK_BYTES = 470


def work_id(task: str, value: str) -> str:
    """Return the id of a work: task and value, readable and unambiguous, at most 470 bytes.

    Keys contain no blanks, so the last blank separates task and value. A longer id is shortened
    like a key, because database indexes have a limit.
    """
    text = f"{task} {value}"
    return text if len(text) <= SHORT_CHARS else shorten(text, limit_bytes=_MOST_WORK_BYTES)


def prefix_of(namespace: str) -> str:
    """Return the prefix of a namespace for keys and work ids."""
    return f"{namespace}:" if namespace else ""


class _Default(str):
    """The default of an option. It equals an explicit value, but has a type of its own."""

    __slots__ = ()


_KEY = _Default("key")


@value
class _Shape:
    """The templates and callables of a call's keys and of its work's id.

    Attributes:
        keys: makes the keys.
        once_per: makes the value that identifies the work; None: the keys or the message do.
        by_message: whether each message is work of its own (`once_per="message"`).
        by_run: whether the work is done anew after it has ended (`once_per="run"`).
        by_tick: whether each tick of a periodic task is work of its own (`once_per="tick"`). A
            message without a tick is work of its own, too.
        work: the first part of the work's id; None: the task's name.
        namespace: None: the application's.
    """

    keys: KeyFunction
    once_per: KeyFunction | None
    by_message: bool
    by_run: bool
    by_tick: bool
    work: str | None
    namespace: str | None

    def ids(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task: str,
        message: MessageRef,
        namespace: str,
    ) -> tuple[tuple[str, ...], str]:
        """Return the sorted keys of a call, and its work's id.

        Raises KeyArgumentError or TypeError for its arguments.
        """
        prefix = prefix_of(namespace if self.namespace is None else self.namespace)
        found = self.keys.found(args, kwargs)
        keys = tuple([prefix + key for key in found.keys]) if prefix else found.keys
        value = prefix + found.name
        if self.by_tick and message.tick:
            value = f"{prefix}tick:{message.tick} {value}"
        elif self.by_message or self.by_tick:
            # The keys are part of the id, too: one message id may be used for several keys.
            value = f"{prefix}message:{message.id} {value}"
        elif self.once_per is not None:
            value = prefix + self.once_per.found(args, kwargs).name
        return keys, work_id(self.work or task, value)


class GuardedFunction:
    """A function, its keys and its policy.

    Args:
        function: the function as written. If its last parameter is `guard`, it gets the guard.
        key: the key template, for example "invoice:<invoice_id>", a list of them, or a callable.
        options: the options of a guarded task. `docs/reference/options.md` has each of them.

    Raises:
        ConfigurationError: an option is wrong, or the function is a generator or a coroutine.
        KeyTemplateError: a template does not fit the function's parameters.

    Attributes:
        awaits: whether `run_coroutine` runs coroutines. By default they are refused.
        function: the function as written.
        name: its module and qualified name. It is the task's name unless the queue has another.
        policy: its options.
        signature: its signature without `guard`.
        by_message: whether each message, or each tick, is work of its own.
        by_run: whether the work is done anew after it has ended (`once_per="run"`).
        by_tick: whether each tick of a periodic task is work of its own.
        row: the `GuardedRow` that it moves. None: there is none.
    """

    awaits: ClassVar[bool] = False

    def __init__(
        self,
        function: Callable[..., Any],
        /,
        *,
        key: KeySpec,
        once_per: OncePer | KeySpec = _KEY,
        work: str | None = None,
        fingerprint: str | KeyCallable | None = None,
        row: GuardedRow | None = None,
        formerly: Former | Sequence[Former] = (),
        **options: Any,
    ) -> None:
        self.function = function
        self.name = f"{function.__module__}.{function.__qualname__}"
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise self._never_runs("a generator, which no queue iterates over")
        if inspect.iscoroutinefunction(function) and not self.awaits:
            raise self._never_runs("async, and its queue does not await it")
        self._says_once_per = not isinstance(once_per, _Default)
        self.policy: Policy = make_policy(options, task=self.name)
        self._signature = inspect.signature(function)
        self.signature, self._wants_guard = _without_guard(self._signature, self.name)
        namespace = self.policy.namespace
        self._shape = self._compile_shape(self._compile(key), once_per, work, namespace)
        self._formers = [
            self._compile_shape(
                self._shape.keys if former.key is None else self._compile(former.key),
                once_per if former.once_per is None else former.once_per,
                work if former.task is None else former.task,
                namespace if former.namespace is None else former.namespace,
            )
            for former in formers_in(formerly, task=self.name)
        ]
        # Workers with the former guard know a line and its messages by their former names only.
        same = [former.once_per is None for former in formers_in(formerly, task=self.name)][:1]
        self._lined = self._formers[:1] if self.policy.parks and True in same else []
        self.by_tick = self._shape.by_tick
        self.by_run = self._shape.by_run
        self.by_message = self._shape.by_message or self.by_tick
        self._fingerprint: KeyFunction | None = None
        if fingerprint is not None:
            if isinstance(fingerprint, list | tuple):
                raise ConfigurationError(
                    f"{self.name}: a fingerprint cannot be a list. Give one template, for example "
                    'fingerprint="<amount>:<currency>", or a callable.'
                )
            self._fingerprint = self._compile(fingerprint)
        self.row = row
        self._refuse_combination(key, once_per, formers_in(formerly, task=self.name))
        self._row_of = self._compile_row()
        self._is_bounded = self.policy.bounded

    def _refuse_combination(
        self, key: KeySpec, once_per: OncePer | KeySpec, formers: Sequence[Former]
    ) -> None:
        """Refuse options that cannot be combined; see `combinations.py`."""
        moved = any(each.key is not None or each.namespace is not None for each in formers)
        policy, several = self.policy, isinstance(key, list | tuple) and len(key) > 1
        reason = refusal(
            keys="several" if several else "one",
            busy=policy.busy,
            once_per=str(once_per) if once_per in _ONCE_PER else "template",
            order=policy.order,
            max_waiting="none" if policy.max_waiting is None else "given",
            limit="several" if policy.has_slots else "one",
            rate="none" if policy.rate is None else "given",
            row="none" if self.row is None else "given",
            formerly="other key" if moved else "same key" if formers else "none",
        )
        if reason is not None:
            raise ConfigurationError(f"{self.name}: {reason}")

    def _compile(self, template: Any) -> KeyFunction:
        return compile_key(template, signature=self._signature, task=self.name)

    def _compile_shape(
        self,
        keys: KeyFunction,
        once_per: OncePer | KeySpec,
        work: str | None,
        namespace: str | None,
    ) -> _Shape:
        named = None if once_per in _ONCE_PER else self._compile(once_per)
        by_message, by_tick = once_per == "message", once_per == "tick"
        return _Shape(keys, named, by_message, once_per == "run", by_tick, work, namespace)

    def _compile_row(self) -> RowId | None:
        if self.row is None:
            return None
        if not hasattr(self.row, "compile_id"):
            raise ConfigurationError(
                f"{self.name}: row={type(self.row).__name__}: give a taskguard.GuardedRow."
            )
        names = [] if self.by_message else [self._shape.once_per or self._shape.keys]
        compiled: RowId = self.row.compile_id(self._signature, task=self.name, templates=names)
        return compiled

    def delivery(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        namespace: str,
        message: MessageRef,
        task: str | None = None,
        published_at_s: float | None = None,
        queue: Queue | None = None,
        parking: Parking | None = None,
        promoted: bool = False,
        rank: int = 0,
        expires_at_s: float | None = None,
        call: Mapping[str, Any] | None = None,
        redelivered: bool = False,
        resumes: bool = False,
        timed_out: Callable[[], bool] | None = None,
        orders: tuple[type[Exception], ...] = (),
    ) -> Delivery:
        """Return the delivery of one message. The other parameters are as in `Delivery`.

        Args:
            args: the arguments of the call by position, without the guard.
            kwargs: its arguments by keyword.
            namespace: the application's namespace, with which keys and work begin unless the task
                has one of its own.
            task: the name under which the queue knows the task. By default the function's name.
            call: how to send the message again, as a JSON object. It is stored with the work.

        Raises:
            KeyArgumentError: an argument cannot be part of a key.
            TypeError: the arguments do not fit the function.
            ConfigurationError: `key=` is a callable and made more keys than the options allow.
        """
        name = task or self.name
        values: dict[str, Any] = {"task": name, "message": message, "namespace": namespace}
        own, work = self._shape.ids(args, kwargs, **values)
        keys, line = own, own
        formerly: tuple[str, ...] = ()
        if self._formers:
            formers = self._former_ids(self._formers, args, kwargs, **values)
            keys = tuple(sorted({*own, *(key for held, _ in formers for key in held)}))
            ids = [work, *(each for _, each in formers)]
            lined = self._former_ids(self._lined, args, kwargs, **values)
            if lined and len(lined[0][0]) == 1:
                line, work = lined[0]
            formerly = tuple(dict.fromkeys(each for each in ids if each != work))
        if self.policy.parks and len(own) > 1:  # a callable has made several
            reason = refusal(keys="several", busy=self.policy.busy)
            raise ConfigurationError(f"{self.name}: its key= made {', '.join(own)}: {reason}")
        return Delivery(
            bounds=self._bounds(keys) if self._is_bounded else None,
            keys=keys,
            line_key=line[0] if len(line) == 1 else None,
            work=work,
            formerly=formerly,
            redelivered=redelivered,
            timed_out=timed_out,
            orders=orders,
            task=name,
            message=message,
            policy=self.policy,
            published_at_s=published_at_s,
            queue=queue,
            parking=parking if self.policy.parks else None,
            promoted=promoted,
            rank=rank,
            expires_at_s=expires_at_s,
            # It needs a stored call, which is sent again if a process dies.
            strict=self.policy.strict and call is not None,
            app=namespace,
            by_message=self.by_message,
            by_run=self._shape.by_run,
            resumes=resumes,
            fingerprint=None if self._fingerprint is None else self._digest(args, kwargs),
            call=None if call is None else stored_call(call, message, namespace),
            row=None if self._row_of is None else self._row_of(args, kwargs),
        )

    def deciding(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, object] | None:
        """Return the arguments of a call that decide which work it is by default.

        None if the guard has an explicit once_per=, also "key", or if something else decides, too:
        a callable makes the key, a row has its own state, or the arguments do not fit the
        signature.
        """
        if self._says_once_per or self.row is not None or self._shape.keys.arguments is None:
            return None
        try:
            return self._shape.keys.deciding(args, kwargs)
        except TypeError:
            return None

    @property
    def is_one_work(self) -> bool:
        """Return whether all calls are one work, because the key has no arguments.

        Return False for an explicit once_per=, also "key", and for a row, which has its own state.
        """
        decides = self._shape.keys.arguments
        return decides == frozenset() and self.row is None and not self._says_once_per

    def _bounds(self, keys: tuple[str, ...]) -> Bounds:
        if len(keys) > 1:
            raise ConfigurationError(
                f"{self.name}: limit= and rate= need a single key, but key= made {len(keys)} for "
                f"this call: {', '.join(keys)}. Return one key."
            )
        return Bounds(keys[0], self.policy.limit, self.policy.starts)

    def _former_ids(
        self,
        shapes: Sequence[_Shape],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        **values: Any,
    ) -> list[tuple[tuple[str, ...], str]]:
        """Return keys and work of a call in each former shape, if it makes a key for the call."""
        found = []
        for shape in shapes:
            # If the former template makes no key, there is no former work.
            with contextlib.suppress(KeyArgumentError):
                found.append(shape.ids(args, kwargs, **values))
        return found

    def _digest(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return a digest of the fingerprint's texts, which may be secret: 32 hex digits."""
        assert self._fingerprint is not None  # noqa: S101
        texts = self._fingerprint.found(args, kwargs).name
        return hashlib.sha256(texts.encode()).hexdigest()[:32]

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], guard: Guard) -> Any:
        """Run the function, with `guard` if it takes one.

        Raises ConfigurationError if the call only made a coroutine or a generator, which nothing
        runs: otherwise the work would be DONE without having run. A decorator may have hidden that
        from the constructor.
        """
        if self._wants_guard:
            kwargs = {**kwargs, GUARD_PARAMETER: guard}
        value = self.function(*args, **kwargs)
        if isinstance(value, Coroutine):
            return self.run_coroutine(value, guard)
        if isinstance(value, _NOT_RUN):
            raise self._never_runs(f"a function that returns a {type(value).__name__}")
        return value

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any], guard: Guard) -> Any:
        """Run the coroutine that the function returned. Only for queues that await coroutines."""
        del guard
        coroutine.close()
        raise self._never_runs(f"a function that returns a {type(coroutine).__name__}")

    def _never_runs(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} is {what}, so its body would never run. Guard a plain function. To await "
            "something, call asyncio.run() in its body."
        )


class AwaitedFunction(GuardedFunction):
    """A coroutine function, whose body runs in the event loop of the coroutine that awaits it."""

    awaits = True

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any], guard: Guard) -> Any:
        """Run the body, in the thread of its delivery."""
        from taskguard.run import beside  # it loads asyncio

        return beside.run_body(coroutine, attempt_of(guard))


def _without_guard(signature: inspect.Signature, name: str) -> tuple[inspect.Signature, bool]:
    parameter = signature.parameters.get(GUARD_PARAMETER)
    if parameter is None:
        return signature, False
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigurationError(
            f"{name}: `guard` is passed by keyword, so it cannot be {parameter.kind.description}."
        )
    _refuse_parameters_after_guard(signature, name)
    others = [each for each in signature.parameters.values() if each.name != GUARD_PARAMETER]
    return signature.replace(parameters=others), True


def _refuse_parameters_after_guard(signature: inspect.Signature, name: str) -> None:
    """Refuse positional parameters after `guard`: a caller's argument would be taken for it."""
    names = list(signature.parameters)
    place = names.index(GUARD_PARAMETER)
    if signature.parameters[GUARD_PARAMETER].kind is inspect.Parameter.KEYWORD_ONLY:
        return
    for later in names[place + 1 :]:
        if signature.parameters[later].kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            raise ConfigurationError(
                f"{name}: put `guard` after {later!r}, or make it keyword-only: callers never "
                "pass it, so no positional parameter can follow it."
            )
