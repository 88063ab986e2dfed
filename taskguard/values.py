"""Values: dataclasses whose fields are read and never assigned to.

`@value` is `@dataclass(slots=True)` with one `__repr__`, `__eq__` and `__hash__` for all classes.
`dataclass(frozen=True)` compiles six functions for each class. For sixty classes that took 30 ms,
more than half of the time that taskguard adds to a process before its first lock.

Does not guarantee immutability at run time: type checkers reject an assignment, Python does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform, overload

__all__ = ["value"]

_Class = TypeVar("_Class", bound=type)


@overload
def value(cls: _Class, /) -> _Class: ...


@overload
def value(*, kw_only: bool = False) -> Callable[[_Class], _Class]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: Any = None, /, *, kw_only: bool = False) -> Any:
    """Make the class a value: its annotated names become fields, as in a frozen dataclass."""
    if cls is None:
        return lambda decorated: _made(decorated, kw_only=kw_only)
    return _made(cls, kw_only=kw_only)


def _made(cls: type, *, kw_only: bool) -> type:
    made: type = dataclass(slots=True, eq=False, repr=False, kw_only=kw_only)(cls)
    shared: dict[str, Any] = {"__repr__": _repr, "__eq__": _eq, "__hash__": _hash}
    for name, function in shared.items():
        if name not in vars(made):
            setattr(made, name, function)
    return made


def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _compared(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, each.name) for each in fields(self) if each.compare)


def _eq(self: Any, other: object) -> Any:
    if type(self) is not type(other):
        return NotImplemented
    return _compared(self) == _compared(other)


def _hash(self: Any) -> int:
    return hash(_compared(self))
