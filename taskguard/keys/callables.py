"""Keys that a user's callable makes from a call's arguments.

Guarantees: the callable gets all arguments by name, defaults applied. Its keys are made safe to
store, and taskguard reads at most as many as a call may have.
Does not guarantee that the callable returns different keys for different work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from taskguard.keys.template import TemplateProblemError
from taskguard.keys.values import BYTES, RefusedValueError, escape, shorten, text_of

__all__ = ["MAX_KEYS", "CallableKeys", "FinishedKey", "callable_name", "finish_key", "too_many"]

MAX_KEYS = 100
# Maximum number of keys that a callable returns, with repeats: a generator may be endless.
_MAX_TEXTS = 10 * MAX_KEYS
_VAR_POSITIONAL, _VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class FinishedKey(str):
    """The result of `key`. If a callable returns it, it is not encoded a second time."""

    __slots__ = ()


class CallableKeys:
    """A key option that is a callable. It gets the task's arguments by name."""

    __slots__ = ("_by_name", "_by_position", "_function", "_stars", "source")

    def __init__(
        self, function: Callable[..., object], parameters: Collection[inspect.Parameter]
    ) -> None:
        # Pass arguments by name, so that `lambda order_id, **_:` can ignore the others. Pass only
        # parameters without a name by position.
        names = {p.kind: p.name for p in parameters}
        stars = names.get(_VAR_POSITIONAL), names.get(_VAR_KEYWORD)
        plain = [p for p in parameters if p.name not in stars]
        self._by_position = tuple(
            p.name
            for p in plain
            if p.kind is p.POSITIONAL_ONLY
            or (p.kind is p.POSITIONAL_OR_KEYWORD and stars[0] is not None)
        )
        self._by_name = tuple(p.name for p in plain if p.name not in self._by_position)
        self._stars = stars
        self._function = function
        self.source = callable_name(function)
        self._check()

    def keys(self, values: Mapping[str, object], *, task: str) -> list[str]:
        """Return the callable's keys for these arguments, in its order; those of a set sorted."""
        result = self._call(values)
        found: list[str] = []
        each: set[str] = set()
        # Making a key of a long text takes time, and an endless generator may repeat a text.
        made: dict[object, str] = {}
        try:
            for text in _texts(result):
                if len(found) == _MAX_TEXTS:
                    raise RefusedValueError(f"returned more than {_MAX_TEXTS:,} texts for one call")
                key = made.get(text) if type(text) is str else _finished(text)
                if key is None:
                    key = made[text] = _finished(text)
                found.append(key)
                each.add(key)
                if len(each) > MAX_KEYS:  # checked here because a generator may be endless
                    raise too_many()
            if found:
                return sorted(found) if isinstance(result, AbstractSet) else found
            raise RefusedValueError("returned no key: return one at least")
        except RefusedValueError as refusal:
            problem = refusal
        raise problem.named(f"the key callable {self.source}", task=task)

    def _check(self) -> None:
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError):  # a builtin may have none
            return
        try:
            signature.bind(*self._by_position, **dict.fromkeys(self._by_name))
        except TypeError as error:
            raise TemplateProblemError(
                f"{self.source} does not take the task's arguments: {error}. It gets all of them"
                " by name. To ignore the others, write lambda order_id, **_: …"
            ) from None

    def _call(self, values: Mapping[str, object]) -> object:
        positional = [values[name] for name in self._by_position]
        named = {name: values[name] for name in self._by_name}
        var_positional, var_keyword = self._stars
        if var_positional is not None:
            positional.extend(values[var_positional])  # type: ignore[arg-type]
        if var_keyword is not None:
            named.update(values[var_keyword])  # type: ignore[call-overload]
        return self._function(*positional, **named)


def _texts(result: object) -> Iterable[object]:
    if isinstance(result, str):
        return (result,)
    if isinstance(result, Iterable) and not isinstance(result, (*BYTES, Mapping)):
        return result
    raise RefusedValueError(f"returned {type(result).__name__}: return text, or a list of texts")


def finish_key(text: object) -> str:
    """Return a text as a key that is safe to store. `:` and `/` stay as separators.

    Raises:
        KeyArgumentError: the text cannot be a key.
    """
    try:
        if not isinstance(text, str) or not text:
            raise RefusedValueError("has to be text, with a character at least")
        return _finished(text)
    except RefusedValueError as refusal:
        problem = refusal
    raise problem.named("the key", task=None)


def _finished(text: object) -> str:
    """Return a callable's text as a key."""
    if isinstance(text, FinishedKey):
        return str(text)
    if not isinstance(text, str):
        raise RefusedValueError(f"returned a list with {type(text).__name__}: each must be text")
    if not str.__len__(text):
        raise RefusedValueError("returned empty text: all such calls would share one key")
    escaped = escape(text_of(text))
    return shorten(escaped.replace("%3A", ":").replace("%2F", "/"))


def too_many() -> RefusedValueError:
    """Return the error for a call that makes too many keys."""
    return RefusedValueError(f"makes more than {MAX_KEYS} keys of one call: split the work")


def callable_name(function: object) -> str:
    """Return the name of a callable for messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
