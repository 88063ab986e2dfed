"""Key templates: `order:<order_id>`, checked once, then filled in for every call.

| in a template | means |
| --- | --- |
| `<name>` | an argument, defaults applied |
| `<order.id>` | an attribute of it |
| `<payload[sku]>`, `<ids[0]>` | an item: a dict's key, or a list's index (`-1` is the last) |
| `<when:%Y-%m-%d>` | a date or time in a format |
| `<email|hash>` | a digest of its text, which is then in no key, log or metric; of a list too |
| `<phone|str>` | the `str()` of an object of any class that defines one |
| `<<` | a literal `<` |

They combine in this order: `<order.lines[0].due:%Y-%m-%d|hash>`.

Guarantees: between two placeholders there is a character that no value can contain, so that
different values make different keys. A dict's item is looked up by text and, if the text consists
of digits, also by number, because JSON converts a dict's numbers to texts.
Does not guarantee that attributes and items are equal on every machine. Reading an attribute may
load it.

Read next: `function.py`, which binds the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from taskguard.keys.formats import explain_format, format_value
from taskguard.keys.values import (
    BYTES,
    SHORT_CHARS,
    VALUE_ALPHABET,
    RefusedValueError,
    digest,
    escape,
    is_short_name,
    is_structure,
    shorten,
    structure_digest,
    text_of,
)
from taskguard.values import value

__all__ = ["MAX_TEMPLATE_CHARS", "Placeholder", "Template", "TemplateProblemError", "parse"]

# Five times the length of a key. It also limits the time to read a template.
MAX_TEMPLATE_CHARS = 1_000

_FILTERS = {
    "hash": "a digest instead of the value",
    "str": "the str() of any object",
}
# An unclosed `<` is a separate token, to distinguish it from a literal one, `<<`.
_tokens = re.compile(r"<<|<[^<>]*>|<|[^<]+").finditer
_NAME = r"[^\W\d]\w*"
_STEP = rf"\.{_NAME}|\[[^\[\]]+\]"
_is_placeholder = re.compile(
    rf"<(?P<name>{_NAME})(?P<path>(?:{_STEP})*)(?::(?P<spec>[^|]*))?(?P<filters>(?:\|[^|]*)*)>"
).fullmatch
_steps = re.compile(_STEP).findall
_is_index = re.compile(r"-?[0-9]{1,9}").fullmatch
# Integers below this are printed directly. Larger ones are measured first.
_MOST_PLAIN = 10**18


class TemplateProblemError(Exception):
    """A problem of a template. It does not leave this package, which adds task and parameters."""


@value
class Placeholder:
    """One `<…>` of a template.

    `argument` is its source without filters: with or without them, the same values are different.
    """

    source: str
    argument: str
    name: str
    path: tuple[Callable[[object], object], ...]
    takes_item: bool
    spec: str | None
    hidden: bool
    by_str: bool

    def fill(self, values: Mapping[str, object], *, task: str | None) -> str:
        """Return the placeholder's text for a key."""
        try:
            value = self._value(values)
            if self.spec is None:
                itself = None if self.hidden else _itself(value)
                if itself is not None:
                    return itself
                if self.hidden and is_structure(value):
                    return structure_digest(value)
            text = self._said(value)
            return digest(text) if self.hidden else escape(text)
        except RefusedValueError as refusal:
            problem = refusal
        # Raise it outside of the except block, so that its context contains no hidden value.
        cause = None if self.hidden else problem.__cause__
        raise problem.named(self.source, task=task) from cause

    def text(self, values: Mapping[str, object], *, task: str | None) -> str:
        """Return the argument's text unchanged, for a column of a table."""
        try:
            return self._said(self._value(values))
        except RefusedValueError as refusal:
            problem = refusal
        raise problem.named(self.source, task=task) from problem.__cause__

    def _value(self, values: Mapping[str, object]) -> object:
        if self.name not in values:  # possible only if the task takes **kwargs
            raise RefusedValueError("is not among the arguments of this call")
        value = values[self.name]
        for step in self.path:
            value = step(value)
        return value

    def _said(self, value: object) -> str:
        if self.spec is not None:
            return format_value(value, self.spec)
        return text_of(value, by_str=self.by_str)


@value
class Template:
    """A parsed template: literal text, and placeholders each with the literal text after it."""

    source: str
    head: str
    tail: tuple[tuple[Placeholder, str], ...]

    def fill(self, values: Mapping[str, object], *, task: str | None) -> str:
        """Return the key for these arguments.

        Raises:
            KeyArgumentError: an argument cannot be part of a key.
        """
        pieces = [self.head]
        for placeholder, literal in self.tail:
            pieces.append(placeholder.fill(values, task=task))
            pieces.append(literal)
        text = "".join(pieces)
        return text if len(text) <= SHORT_CHARS else shorten(text)

    def text(self, values: Mapping[str, object], *, task: str) -> str:
        """Return the text for a column: neither escaped nor shortened.

        Raises:
            KeyArgumentError: an argument is no text.
        """
        pieces = [self.head]
        for placeholder, literal in self.tail:
            pieces.append(placeholder.text(values, task=task))
            pieces.append(literal)
        return "".join(pieces)


def parse(source: str) -> Template:
    """Read a template.

    Raises:
        TemplateProblemError: it cannot be read, or two different calls could make one key.
    """
    source = str.__str__(source)  # a subclass may have another __len__
    if not source:
        raise TemplateProblemError("the template is empty")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateProblemError(
            f"the template has {len(source):,} characters, at most {MAX_TEMPLATE_CHARS:,} are"
            " allowed"
        )
    bad = next((c for c in source if not c.isprintable()), None)
    if bad is not None:
        raise TemplateProblemError(
            f"the template has the character {bad!r} (U+{ord(bad):04X}); there are no control"
            " characters, and no spaces but the usual one"
        )
    literals = [""]
    placeholders: list[Placeholder] = []
    for match in _tokens(source):
        part = match[0]
        if part == "<<":
            literals[-1] += "<"
        elif part == "<":
            raise TemplateProblemError(
                f"the '<' of {source[match.start() :]!r} is not closed; '<<' is a literal '<'"
            )
        elif part.startswith("<"):
            placeholders.append(_parse_placeholder(part))
            literals.append("")
        else:
            literals[-1] += part
    _check_literals(literals, placeholders)
    return Template(source, literals[0], tuple(zip(placeholders, literals[1:], strict=True)))


def _check_literals(literals: list[str], placeholders: list[Placeholder]) -> None:
    for literal in literals:
        bad = next((c for c in literal if c in " {}%"), None)
        if bad is not None:
            raise TemplateProblemError(
                f"the text {literal!r} has the character {bad!r} (U+{ord(bad):04X}); outside"
                " placeholders there are no spaces, '{', '}' or '%'"
            )
    for first, between, second in zip(placeholders, literals[1:], placeholders[1:], strict=False):
        if VALUE_ALPHABET.issuperset(between):
            raise TemplateProblemError(
                f"between {first.source} and {second.source} there is {between!r}, which values can"
                " hold too, so that different calls could make one key: put ':' or '/' between them"
            )


def _parse_placeholder(token: str) -> Placeholder:
    match = _is_placeholder(token)
    if match is None:
        raise TemplateProblemError(
            f"{token} cannot be read; a placeholder is <name>, <order.id>, <payload[sku]>,"
            " <when:%Y-%m-%d>, <email|hash> or these together, in this order"
        )
    spec: str | None = match["spec"]
    filters = match["filters"].split("|")[1:]
    _check_filters(token, filters)
    problem = None if spec is None else explain_format(spec)
    if problem is not None:
        raise TemplateProblemError(f"{token} {problem}")
    if spec is not None and "str" in filters:
        raise TemplateProblemError(f"{token}: |str makes text, which takes no format")
    return Placeholder(
        source=token,
        argument=match["name"] + match["path"] + ("" if spec is None else f":{spec}"),
        name=match["name"],
        path=tuple(
            _item(s[1:-1]) if s[0] == "[" else _attribute(s[1:]) for s in _steps(match["path"])
        ),
        takes_item=match["path"].startswith("["),
        spec=spec,
        hidden="hash" in filters,
        by_str="str" in filters,
    )


def _check_filters(token: str, filters: list[str]) -> None:
    for name in filters:
        if name not in _FILTERS:
            known = ", ".join(f"|{known} ({meaning})" for known, meaning in _FILTERS.items())
            raise TemplateProblemError(f"{token}: there is no filter |{name}; there are {known}")
        if filters.count(name) > 1:
            raise TemplateProblemError(f"{token}: |{name} is there twice")


def _itself(value: Any) -> str | None:
    """Return the text of a short number or name, which needs no escape; otherwise None."""
    kind = type(value)
    if kind is int:
        return int.__repr__(value) if -_MOST_PLAIN < value < _MOST_PLAIN else None
    return value if kind is str and is_short_name(value) else None


def _attribute(name: str) -> Callable[[object], object]:
    def step(value: object) -> object:
        try:
            return getattr(value, name)
        except AttributeError as error:
            raise RefusedValueError(
                f"cannot be read: {type(value).__name__} has no attribute {name!r}"
            ) from error

    return step


def _item(text: str) -> Callable[[object], object]:
    index = int(text) if _is_index(text) else None

    def step(value: object) -> object:
        kind = type(value)
        try:
            if issubclass(kind, Mapping):
                return _mapping_item(value, text, index)  # type: ignore[arg-type]
            if not issubclass(kind, (str, *BYTES)):
                return value[text if index is None else index]  # type: ignore[index]
        except (LookupError, TypeError) as error:
            raise RefusedValueError(
                f"cannot be read: {kind.__name__} has no item {text!r}"
            ) from error
        # Refuse an index into a text or bytes: it is a mistake, such as a dict sent as JSON text.
        raise RefusedValueError(f"cannot be read: {kind.__name__} has no item {text!r}")

    return step


def _mapping_item(mapping: Mapping[object, object], text: str, index: int | None) -> object:
    # Test with `in` first: a defaultdict would create a missing item.
    if text in mapping:
        return mapping[text]
    if index is not None and index in mapping:
        return mapping[index]
    raise KeyError(text)
