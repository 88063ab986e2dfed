"""From a call's arguments to its keys: what the decorator compiles, and `taskguard.key`.

Guarantees: everything that can be known from the signature is checked when it is compiled.
Arguments that do not fit the signature raise a `TypeError`, as the call itself would. Several keys
come sorted by code point and without repeats, so that all take them in one order; their name lists
them as the templates and callables gave them, and different lists never have one name.
Does not guarantee: that a callable's keys tell different work apart. Its text is the user's; it is
only made safe to store. Nor that two processes name the same work alike where a callable's list is
in an order that changes, as that of `list({…})` does; a set that it returns is sorted.

Read next: `template.py` for the syntax, `values.py` for what counts as a text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple

from taskguard.errors import KeyTemplateError
from taskguard.keys.arguments import Arguments, check_name
from taskguard.keys.template import MAX_TEMPLATE_CHARS, Template, TemplateProblemError, parse
from taskguard.keys.values import BYTES, RefusedValueError, escape, shorten, text_of

__all__ = [
    "MAX_KEYS",
    "KeyFunction",
    "KeySpec",
    "Keys",
    "TextFunction",
    "compile_key",
    "compile_texts",
    "key",
]

MAX_KEYS = 100
# So many keys a callable may return, repeats included: a generator may have no end.
_MAX_TEXTS = 10 * MAX_KEYS

# Separators that no key holds, in which `%` is followed by two hex digits or `~`: one between the
# parts of a list, one between the keys of a callable, so that [[a], [b, c]] is not [[a, b], [c]].
_BETWEEN_PARTS = "%,"
_BETWEEN_KEYS = "%;"

KeyCallable = Callable[..., str | Iterable[str]]
KeySpec = str | KeyCallable | Sequence[str | KeyCallable]


class Keys(NamedTuple):
    """What a call's key option says.

    Attributes:
        keys: the keys to be locked, sorted, each once.
        name: all keys in the order in which they were given, repeats included, as one text that no
            other list has.
    """

    keys: tuple[str, ...]
    name: str


class _FinishedKey(str):
    """What `key` returned: a callable may hand it on, and it is not encoded a second time."""

    __slots__ = ()


def key(template: str, /, **values: object) -> str:
    """The key that a task with this template takes, for use elsewhere.

    `taskguard.key("order:<order_id>", order_id=42)` is `"order:42"`. Values that the template does
    not name are ignored.

    Raises:
        KeyTemplateError: the template cannot be read, or names a value that was not given.
        KeyArgumentError: a value cannot be part of a key.
    """
    template_is_text = isinstance(template, str)
    try:
        if not template_is_text:
            raise TemplateProblemError(f"a template is text, not {type(template).__name__}")
        parsed = _parse_once(str.__str__(template))
        for placeholder, _ in parsed.tail:
            check_name(placeholder, values)
    except TemplateProblemError as problem:
        given = ", ".join(values) or "none"
        raise KeyTemplateError(
            f"key {_describe(template)}: {problem}. Values given: {given}.",
            template=template if template_is_text else _describe(template),
        ) from None
    return _FinishedKey(parsed.fill(values, task=None))


_parse_once = lru_cache(maxsize=256)(parse)


def compile_key(
    spec: KeySpec,
    *,
    signature: inspect.Signature,
    task: str,
    ignore: Collection[str] = ("guard",),
) -> KeyFunction:
    """Check a `key` or `once_per` option against a task's signature; the result makes its keys.

    `spec` is a template, a callable, or a list of these. A callable is called with all arguments of
    the task by name, defaults applied, and returns one key or several. Parameters in `ignore` are
    not the caller's to pass and are not seen.

    Raises:
        KeyTemplateError: `spec` does not fit; the message names the task, the placeholder and the
            parameters there are.
    """
    arguments = Arguments(signature, task=task, ignore=ignore)
    try:
        parts = tuple(_compile_part(part, arguments) for part in _parts(spec))
    except TemplateProblemError as problem:
        raise KeyTemplateError(
            f"task {task}, key {_describe(spec)}: {problem}. Parameters: {arguments.describe()}.",
            task=task,
            template=_describe(spec) if not isinstance(spec, str) else spec,
        ) from None
    return KeyFunction(parts, arguments, task=task)


class KeyFunction:
    """Makes a call's keys: one at least, sorted, each once, and their name.

    `sources` are the templates. `arguments` is what their placeholders name; None where a callable
    may use any.
    """

    __slots__ = ("_arguments", "_parts", "arguments", "sources", "task")

    def __init__(
        self, parts: tuple[Template | _Callable, ...], arguments: Arguments, *, task: str
    ) -> None:
        self._parts = parts
        self._arguments = arguments
        self.sources = tuple(part.source for part in parts)
        self.arguments = _named(parts)
        self.task = task

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, ...]:
        """The keys of a call with these arguments, as `found()` has them."""
        return self.found(args, kwargs).keys

    def found(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Keys:
        """The keys of a call with these arguments, and their name.

        Raises:
            KeyArgumentError: an argument cannot be part of a key.
            TypeError: the arguments do not fit the task's signature.
        """
        values = self._arguments.bind(args, kwargs)
        found: list[str] = []
        names: list[str] = []
        for part in self._parts:
            if isinstance(part, Template):
                several = [part.fill(values, task=self.task)]
            else:
                several = part.keys(values, task=self.task)
            found += several
            names.append(_BETWEEN_KEYS.join(several))
        if len(found) == 1:
            return Keys((found[0],), found[0])
        keys = sorted(set(found))
        if len(keys) > MAX_KEYS:
            raise _too_many().named("its key option", task=self.task)
        return Keys(tuple(keys), _BETWEEN_PARTS.join(names))

    def __repr__(self) -> str:
        return f"<KeyFunction {' '.join(self.sources)} of {self.task}>"


def _named(parts: tuple[Template | _Callable, ...]) -> frozenset[str] | None:
    found: set[str] = set()
    for part in parts:
        if isinstance(part, _Callable):
            return None
        found.update(placeholder.argument for placeholder, _ in part.tail)
    return frozenset(found)


def compile_texts(
    templates: Mapping[str, str], *, signature: inspect.Signature, task: str
) -> TextFunction:
    """Check templates whose texts are columns of a row, by the columns' names.

    Raises:
        KeyTemplateError: one does not fit; the message names the task, the placeholder and the
            parameters there are.
    """
    arguments = Arguments(signature, task=task, ignore=("guard",))
    parsed = {}
    for name, source in templates.items():
        try:
            if not isinstance(source, str):
                raise TemplateProblemError(f"a template is text, not {type(source).__name__}")
            parsed[name] = parse(source)
            for placeholder, _ in parsed[name].tail:
                arguments.check(placeholder)
                if placeholder.hidden:
                    raise TemplateProblemError(f"{placeholder.source}: a row has no digest as id")
        except TemplateProblemError as problem:
            raise KeyTemplateError(
                f"task {task}, id {_describe_part(source)}: {problem}. Parameters: "
                f"{arguments.describe()}.",
                task=task,
                template=_describe_part(source),
            ) from None
    return TextFunction(parsed, arguments, task=task)


class TextFunction:
    """Makes a call's texts, by name; unlike keys they are neither escaped nor shortened.

    Attributes:
        arguments: the arguments that the placeholders name.
    """

    __slots__ = ("_arguments", "_task", "_templates", "arguments")

    def __init__(
        self, templates: Mapping[str, Template], arguments: Arguments, *, task: str
    ) -> None:
        self._templates = templates
        self._arguments = arguments
        self._task = task
        self.arguments = frozenset(
            placeholder.argument for each in templates.values() for placeholder, _ in each.tail
        )

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, str]:
        """The texts of a call with these arguments.

        Raises:
            KeyArgumentError: an argument is no text.
            TypeError: the arguments do not fit the task's signature.
        """
        values = self._arguments.bind(args, kwargs)
        return {
            name: template.text(values, task=self._task)
            for name, template in self._templates.items()
        }


def _too_many() -> RefusedValueError:
    return RefusedValueError(f"makes more than {MAX_KEYS} keys of one call: split the work")


def _parts(spec: object) -> Sequence[object]:
    if isinstance(spec, str) or callable(spec):
        return (spec,)
    if not isinstance(spec, (list, tuple)):
        raise TemplateProblemError(
            f"a key is a template, a callable, or a list of these, not {type(spec).__name__}"
        )
    if not 0 < len(spec) <= MAX_KEYS:
        raise TemplateProblemError(f"the list has {len(spec)} keys, not 1 to {MAX_KEYS}")
    return spec


def _describe(spec: object) -> str:
    if not isinstance(spec, (list, tuple)):
        return _describe_part(spec)
    shown = [*map(_describe_part, spec[:MAX_KEYS]), *(["…"] if len(spec) > MAX_KEYS else [])]
    return f"[{', '.join(shown)}]"


def _describe_part(part: object) -> str:
    # A value of another kind is not printed: it may be cyclic, or have megabytes.
    if isinstance(part, str):
        text = str.__str__(part)
        return repr(text) if len(text) <= MAX_TEMPLATE_CHARS else f"{text[:100]!r}…"
    return _callable_name(part) if callable(part) else f"<{type(part).__name__}>"


def _callable_name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _compile_part(part: object, arguments: Arguments) -> Template | _Callable:
    if isinstance(part, str):
        template = parse(part)
        for placeholder, _ in template.tail:
            arguments.check(placeholder)
        return template
    if callable(part):
        return _Callable(part, arguments)
    raise TemplateProblemError(
        f"a list of keys holds templates and callables, not {type(part).__name__}"
    )


class _Callable:
    """A key option that is code: called with the task's arguments, by name."""

    __slots__ = ("_arguments", "_by_name", "_by_position", "_function", "source")

    def __init__(self, function: KeyCallable, arguments: Arguments) -> None:
        # Called by name, so that `lambda order_id, **_:` can leave out what it does not need and no
        # two are mixed up; by position only parameters that cannot be named.
        stars = (arguments.var_positional, arguments.var_keyword)
        parameters = [p for p in arguments.parameters.values() if p.name not in stars]
        self._by_position = tuple(
            p.name
            for p in parameters
            if p.kind is p.POSITIONAL_ONLY
            or (p.kind is p.POSITIONAL_OR_KEYWORD and arguments.var_positional is not None)
        )
        self._by_name = tuple(p.name for p in parameters if p.name not in self._by_position)
        self._arguments = arguments
        self._function = function
        self.source = _callable_name(function)
        self._check()

    def keys(self, values: Mapping[str, object], *, task: str) -> list[str]:
        """The keys that the callable names for these arguments, in its order; a set's sorted."""
        result = self._call(values)
        found: list[str] = []
        each: set[str] = set()
        try:
            for text in _texts(result):
                if len(found) == _MAX_TEXTS:
                    raise RefusedValueError(f"returned more than {_MAX_TEXTS:,} texts for one call")
                found.append(finish_key(text))
                each.add(found[-1])
                if len(each) > MAX_KEYS:  # before a generator without an end fills the memory
                    raise _too_many()
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
                f"{self.source} does not take the task's arguments: {error}. It gets all of them,"
                " by name; one that uses a few is written lambda order_id, **_: …"
            ) from None

    def _call(self, values: Mapping[str, object]) -> object:
        positional = [values[name] for name in self._by_position]
        named = {name: values[name] for name in self._by_name}
        if self._arguments.var_positional is not None:
            positional.extend(values[self._arguments.var_positional])  # type: ignore[arg-type]
        if self._arguments.var_keyword is not None:
            named.update(values[self._arguments.var_keyword])  # type: ignore[call-overload]
        return self._function(*positional, **named)


def _texts(result: object) -> Iterable[object]:
    if isinstance(result, str):
        return (result,)
    if isinstance(result, Iterable) and not isinstance(result, (*BYTES, Mapping)):
        return result
    raise RefusedValueError(f"returned {type(result).__name__}: return text, or a list of texts")


def finish_key(text: object) -> str:
    """A callable's text made safe to store. `:` and `/` stay, as the separators that they are."""
    if isinstance(text, _FinishedKey):
        return str(text)
    if not isinstance(text, str):
        raise RefusedValueError(f"returned a list with {type(text).__name__}: each must be text")
    if not str.__len__(text):
        raise RefusedValueError("returned empty text: all such calls would share one key")
    escaped = escape(text_of(text))
    return shorten(escaped.replace("%3A", ":").replace("%2F", "/"))
