"""What a guard's decorator makes of a function, for type checkers: the function less `guard`.

Guarantees to mypy and pyright: a function that takes no guard stays what it is. One that takes it
last, after four others at most, is called without it, and what is given by position is checked; one
that takes it after more, or by keyword alone, is called with anything. What they return is known.

Does not guarantee that names are checked: types can take a parameter away by its place, not by its
name. So what is given by keyword is not looked at, and mypy wants a function that has other
parameters by keyword alone to be called with a guard. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, TypeVarTuple, Unpack, overload

from taskguard.run.guard import Guard

__all__ = ["Decorator"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Ts = TypeVarTuple("Ts")


class _Guarded(Protocol[R_co]):
    """A function whose guard is given to it; on a class, a method."""

    __name__: str
    __qualname__: str

    @overload
    def __get__(self, instance: None, owner: Any) -> _Guarded[R_co]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., R_co]: ...


# By position, with the rest by keyword. Written out, for pyright forgets a `*args: *Ts` among
# several signatures where Celery's types ask for one (`ship.delay(42)`).
class _Takes1(_Guarded[R_co], Protocol[A_contra, R_co]):
    @overload
    def __call__(self, a: A_contra, /) -> R_co: ...
    @overload
    def __call__(self, **kwargs: Any) -> R_co: ...


class _Takes2(_Guarded[R_co], Protocol[A_contra, B_contra, R_co]):
    @overload
    def __call__(self, a: A_contra, b: B_contra, /) -> R_co: ...
    @overload
    def __call__(self, a: A_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, **kwargs: Any) -> R_co: ...


class _Takes3(_Guarded[R_co], Protocol[A_contra, B_contra, C_contra, R_co]):
    @overload
    def __call__(self, a: A_contra, b: B_contra, c: C_contra, /) -> R_co: ...
    @overload
    def __call__(self, a: A_contra, b: B_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, a: A_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, **kwargs: Any) -> R_co: ...


class _Takes4(_Guarded[R_co], Protocol[A_contra, B_contra, C_contra, D_contra, R_co]):
    @overload
    def __call__(self, a: A_contra, b: B_contra, c: C_contra, d: D_contra, /) -> R_co: ...
    @overload
    def __call__(self, a: A_contra, b: B_contra, c: C_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, a: A_contra, b: B_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, a: A_contra, /, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, **kwargs: Any) -> R_co: ...


# `guard` by keyword alone, after so many others.
class _Named0(Protocol[R_co]):
    def __call__(self, *, guard: Guard) -> R_co: ...


class _Named1(Protocol[R_co]):
    def __call__(self, _1: Any, /, *, guard: Guard) -> R_co: ...


class _Named2(Protocol[R_co]):
    def __call__(self, _1: Any, _2: Any, /, *, guard: Guard) -> R_co: ...


class _Named3(Protocol[R_co]):
    def __call__(self, _1: Any, _2: Any, _3: Any, /, *, guard: Guard) -> R_co: ...


class _Named4(Protocol[R_co]):
    def __call__(self, _1: Any, _2: Any, _3: Any, _4: Any, /, *, guard: Guard) -> R_co: ...


class Decorator(Protocol):
    """What `guarded_task(…)`, `guarded_job(…)` and `tg.guarded(…)` are for a type checker."""

    # A function whose last parameter takes any object, or that has no types, is not recognised by
    # it.
    @overload
    def __call__(self, function: Callable[[Unpack[Ts], object], R], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, function: Callable[[Guard], R], /) -> Callable[[], R]: ...
    @overload
    def __call__(self, function: Callable[[A, Guard], R], /) -> _Takes1[A, R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, Guard], R], /) -> _Takes2[A, B, R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, C, Guard], R], /) -> _Takes3[A, B, C, R]: ...
    @overload
    def __call__(self, function: Callable[[A, B, C, D, Guard], R], /) -> _Takes4[A, B, C, D, R]: ...
    @overload
    def __call__(self, function: Callable[[Unpack[Ts], Guard], R], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, function: _Named0[R], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, function: _Named1[R], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, function: _Named2[R], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, function: _Named3[R], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, function: _Named4[R], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...
