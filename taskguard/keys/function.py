"""Makes a call's keys from its arguments: the compiled key option, and `taskguard.key`.

Guarantees:

* Compiling checks everything that depends on the signature alone.
* Arguments that do not fit the signature raise the `TypeError` of `inspect`, as the call would.
* Several keys are sorted by code point, without repeats, so that all deliveries take them in one
  order. Their name lists them in the order of the templates and callables. Different lists have
  different names.

Does not guarantee that two processes name the same work alike if a callable returns a list in a
changing order, such as `list({…})`. A set is sorted.

Read next: `template.py` for the syntax, `values.py` for the text of a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from taskguard.errors import KeyTemplateError
from taskguard.keys.callables import MAX_KEYS, CallableKeys, FinishedKey, callable_name, too_many
from taskguard.keys.template import (
    MAX_TEMPLATE_CHARS,
    Placeholder,
    Template,
    TemplateProblemError,
    parse,
)

__all__ = [
    "Arguments",
    "KeyCallable",
    "KeyFunction",
    "KeySpec",
    "Keys",
    "TextFunction",
    "compile_key",
    "compile_texts",
    "key",
]

# Separators of a name. No key contains them, because in a key `%` is followed by two hex digits or
# `~`. There are two, so that the lists [[a], [b, c]] and [[a, b], [c]] have different names.
_BETWEEN_PARTS = "%,"
_BETWEEN_KEYS = "%;"

_Parameter = inspect.Parameter
KeyCallable = Callable[..., str | Iterable[str]]
KeySpec = str | KeyCallable | Sequence[str | KeyCallable]
"""Template of the key, for example `"order:<order_id>"`, a callable that returns keys, or a list of
these. A delivery locks all its keys. The work's id has them in the order of the list.

Name what only one delivery at a time may work on: the order, the account, the file.
"""


class Keys(NamedTuple):
    """The keys of a call.

    Attributes:
        keys: the keys to lock, sorted, without repeats.
        name: a text for all keys, in the order of the option and with repeats. Other lists have
            other names.
    """

    keys: tuple[str, ...]
    name: str


def key(template: str, /, **values: object) -> str:
    """Return the key that a task with this template takes, for use elsewhere.

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
    return FinishedKey(parsed.fill(values, task=None))


_parse_once = lru_cache(maxsize=256)(parse)


def check_name(placeholder: Placeholder, names: Collection[str]) -> None:
    """Raise TemplateProblemError unless `placeholder` names one of `names`."""
    if placeholder.name in names:
        return
    import difflib

    close = difflib.get_close_matches(placeholder.name, names, n=1)
    hint = f" (did you mean <{close[0]}>?)" if close else ""
    raise TemplateProblemError(f"{placeholder.source} is not one of the arguments{hint}")


class Arguments:
    """Binds calls to a signature, if possible without `inspect`.

    `Signature.bind` takes several times as long as the rest of a key. For a signature without
    `*args` and `**kwargs` it is enough to know which names must and which may be keywords, for each
    number of positional arguments.
    """

    def __init__(self, signature: inspect.Signature, *, task: str, ignore: Collection[str]) -> None:
        parameters = [p for n, p in signature.parameters.items() if n not in ignore]
        self._task = task
        self._signature = signature.replace(parameters=parameters)
        self.parameters = self._signature.parameters
        self.var_positional = self._name_of(_Parameter.VAR_POSITIONAL)
        self.var_keyword = self._name_of(_Parameter.VAR_KEYWORD)
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._positional = tuple(
            p.name
            for p in parameters
            if p.kind in (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
        )
        self._keywords_after: tuple[tuple[frozenset[str], frozenset[str]], ...] = ()
        if self.var_positional is None and self.var_keyword is None:
            self._keywords_after = tuple(
                self._required_and_allowed(n) for n in range(len(self._positional) + 1)
            )

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Return each parameter's value by its name, including the names in `**kwargs`."""
        if len(args) < len(self._keywords_after):
            required, allowed = self._keywords_after[len(args)]
            given = kwargs.keys()
            if required <= given <= allowed:
                values = self._defaults.copy()
                values.update(zip(self._positional, args, strict=False))
                values.update(kwargs)
                return values
        return self._bind_slowly(args, kwargs)

    def check(self, placeholder: Placeholder) -> None:
        """Raise TemplateProblemError unless the placeholder names an argument."""
        name = placeholder.name
        if name in (self.var_positional, self.var_keyword) and not placeholder.takes_item:
            example = f"<{name}[0]>" if name == self.var_positional else f"<{name}[name]>"
            raise TemplateProblemError(
                f"{placeholder.source} collects several arguments: name one, as in {example}"
            )
        if self.var_keyword is None:  # otherwise any name is allowed
            check_name(placeholder, self.parameters)

    def describe(self) -> str:
        """Return the parameters for an error message."""
        stars = {self.var_positional: "*", self.var_keyword: "**"}
        return ", ".join(f"{stars.get(name, '')}{name}" for name in self.parameters) or "none"

    def _name_of(self, kind: object) -> str | None:
        return next((p.name for p in self.parameters.values() if p.kind is kind), None)

    def _required_and_allowed(self, given: int) -> tuple[frozenset[str], frozenset[str]]:
        rest = [p for n, p in self.parameters.items() if n not in self._positional[:given]]
        return (
            frozenset(p.name for p in rest if p.default is p.empty),
            frozenset(p.name for p in rest if p.kind is not p.POSITIONAL_ONLY),
        )

    def _bind_slowly(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Mapping[str, object]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._task}: {error}") from None
        bound.apply_defaults()
        collected = bound.arguments[self.var_keyword] if self.var_keyword else {}
        return {**collected, **bound.arguments}


def compile_key(
    spec: KeySpec,
    *,
    signature: inspect.Signature,
    task: str,
    ignore: Collection[str] = ("guard",),
) -> KeyFunction:
    """Check a `key` or `once_per` option against a task's signature. Return a maker of its keys.

    `spec` is a template, a callable, or a list of these. A callable gets all arguments of the task
    by name, defaults applied, and returns one key or several. Parameters in `ignore` are left out,
    because callers do not pass them.

    Raises:
        KeyTemplateError: `spec` does not fit. The message names the task, the placeholder and the
            task's parameters.
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
    """Makes the keys of a call, at least one, and their name.

    Attributes:
        sources: the templates.
        arguments: the arguments that the placeholders name; None if a callable may use any.
    """

    __slots__ = ("_arguments", "_parts", "arguments", "sources", "task")

    def __init__(
        self, parts: tuple[Template | CallableKeys, ...], arguments: Arguments, *, task: str
    ) -> None:
        self._parts = parts
        self._arguments = arguments
        self.sources = tuple(part.source for part in parts)
        self.arguments = _named(parts)
        self.task = task

    def __call__(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, ...]:
        """Return the keys of a call with these arguments."""
        return self.found(args, kwargs).keys

    def found(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Keys:
        """Return the keys of a call with these arguments, and their name.

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
            raise too_many().named("its key option", task=self.task)
        return Keys(tuple(keys), _BETWEEN_PARTS.join(names))

    def deciding(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return the arguments that the templates name. Raises TypeError if they do not fit."""
        values = self._arguments.bind(args, kwargs)
        return {name: values[name] for name in self.arguments or () if name in values}

    def __repr__(self) -> str:
        return f"<KeyFunction {' '.join(self.sources)} of {self.task}>"


def _named(parts: tuple[Template | CallableKeys, ...]) -> frozenset[str] | None:
    found: set[str] = set()
    for part in parts:
        if isinstance(part, CallableKeys):
            return None
        found.update(placeholder.argument for placeholder, _ in part.tail)
    return frozenset(found)


def compile_texts(
    templates: Mapping[str, str], *, signature: inspect.Signature, task: str
) -> TextFunction:
    """Check templates whose texts are columns of a row, by the columns' names.

    Raises:
        KeyTemplateError: one does not fit. The message names the task, the placeholder and the
            task's parameters.
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
                    raise TemplateProblemError(
                        f"{placeholder.source}: a row's id cannot be a digest; remove |hash"
                    )
        except TemplateProblemError as problem:
            raise KeyTemplateError(
                f"task {task}, id {_describe_part(source)}: {problem}. Parameters: "
                f"{arguments.describe()}.",
                task=task,
                template=_describe_part(source),
            ) from None
    return TextFunction(parsed, arguments, task=task)


class TextFunction:
    """Makes texts by name from a call. Unlike keys, they are neither escaped nor shortened.

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
        """Return the texts of a call with these arguments.

        Raises:
            KeyArgumentError: an argument is no text.
            TypeError: the arguments do not fit the task's signature.
        """
        values = self._arguments.bind(args, kwargs)
        return {
            name: template.text(values, task=self._task)
            for name, template in self._templates.items()
        }


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
    # Show only the type of any other value: the value may be cyclic or very large.
    if isinstance(part, str):
        text = str.__str__(part)
        return repr(text) if len(text) <= MAX_TEMPLATE_CHARS else f"{text[:100]!r}…"
    return callable_name(part) if callable(part) else f"<{type(part).__name__}>"


def _compile_part(part: object, arguments: Arguments) -> Template | CallableKeys:
    if isinstance(part, str):
        template = parse(part)
        for placeholder, _ in template.tail:
            arguments.check(placeholder)
        return template
    if callable(part):
        return CallableKeys(part, arguments.parameters.values())
    raise TemplateProblemError(
        f"a list of keys holds templates and callables, not {type(part).__name__}"
    )
