"""The type of a decorated function, for type checkers: the function without its `guard`.

Guarantees for mypy and pyright:

* A function without a guard keeps its type.
* If `guard` is the last of at most five parameters, callers leave it out, and positional arguments
  are checked.
* If `guard` follows more parameters, or is keyword-only, callers may pass anything.
* The return type is known.

Does not guarantee checks of keyword arguments: a type can remove a parameter by its position, and
not by its name. If a function has other keyword-only parameters, mypy requires a guard in calls.
Nothing here runs.
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
    """A function that gets its guard from taskguard. In a class it is a method."""

    __name__: str
    __qualname__: str

    @overload
    def __get__(self, instance: None, owner: Any) -> _Guarded[R_co]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., R_co]: ...


# Positional arguments first, the rest by keyword. Each number of parameters has its own class,
# because pyright loses `*args: *Ts` in an overload if Celery's types need one signature
# (`ship.delay(42)`).
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


# A keyword-only `guard`, after this number of other parameters.
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
    """The type of `guarded_task(…)`, `guarded_job(…)` and `tg.guarded(…)`."""

    # For a function without types, or whose last parameter takes any object: it may not be a guard.
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
