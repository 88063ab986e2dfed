"""The arguments of a message as its body gets them: with `pydantic=True` dicts become models.

Guarantees: a key that is computed from a message outside its delivery is equal to the key that the
delivery computes. Celery's own wrapper validates the arguments, with its models, `pydantic_strict`
and `pydantic_context`. The body does not run, and a decorator of the user's that changes arguments
is not called.

Read next: `recognition.py` for the layers of a task's function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

import celery.app.base
from celery import Task

from taskguard import errors
from taskguard_celery.recognition import layers, takes_itself

__all__ = ["Arguments", "body_arguments", "sent_arguments"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# The name by which Celery's wrapper for pydantic calls the function under it.
_FUNCTION = "task_fun"


def body_arguments(task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a message as the function of its task gets them, `self` included.

    Raises:
        KeyArgumentError: the task's models refuse the arguments.
        TypeError: the arguments do not fit the function.
    """
    itself = (task,) if takes_itself(task) else ()
    arguments = (*itself, *args), dict(kwargs)
    wrapper = next(filter(_validates, layers(task)), None)
    if wrapper is None:
        return arguments
    found: list[Arguments] = []
    try:
        _calling(wrapper, lambda *args, **kwargs: found.append((args, kwargs)))(
            *arguments[0], **arguments[1]
        )
    except TypeError:
        raise
    except Exception as error:
        raise errors.KeyArgumentError(
            f"{task.name}: its pydantic models refuse the arguments ({type(error).__name__}), so "
            "that its key is not known. Send what the models accept."
        ) from error
    return found[0]


def sent_arguments(
    task: Task, args: Sequence[Any], kwargs: Mapping[str, Any], *, serializer: str | None
) -> Arguments:
    """Return arguments as `apply_async()` sends them: Celery 5.7 sends models as dicts."""
    dump = getattr(task, "_dump_pydantic_arguments", None)
    if dump is None or serializer == "pickle":
        return tuple(args), dict(kwargs)
    args, kwargs = dump(tuple(args), dict(kwargs))
    return tuple(args), dict(kwargs)


def _validates(function: Any) -> bool:
    """Return whether this is Celery's wrapper for `pydantic=True`."""
    return (
        isinstance(function, FunctionType)
        and function.__globals__ is vars(celery.app.base)
        and _FUNCTION in function.__code__.co_freevars
    )


def _calling(wrapper: FunctionType, function: Callable[..., Any]) -> FunctionType:
    """Return Celery's wrapper as it is, around another function."""
    names, cells = wrapper.__code__.co_freevars, wrapper.__closure__ or ()
    closure = tuple(
        CellType(function) if name == _FUNCTION else cell
        for name, cell in zip(names, cells, strict=True)
    )
    return FunctionType(wrapper.__code__, wrapper.__globals__, closure=closure)
