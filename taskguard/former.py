"""What a guard was before a deploy changed it: `formerly=`.

A work's id is made of the task's name, `once_per` (by default the key) and the namespace. A deploy
that changes one of them gives all work new ids, under which nothing is on record: a message that
was done before, and is delivered again, would have its effect twice.

    @guarded_task(key="shop:<shop>:order:<order_id>", formerly=Former(key="order:<order_id>"))

Guarantees: a claim holds the former keys as well, looks at the record under each former id, and
writes there, too, all in its own transaction. So it excludes, and is excluded by, workers that
still run with the former guard, and each finds what the other has done.

Read next: `states.speaking_record()` for which of several records counts, and
`docs/how-to/changing-a-guard.md` for what to do when.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taskguard.delivery import MessageRef
from taskguard.errors import ConfigurationError, KeyArgumentError
from taskguard.keys import KeyFunction, compile_key, shorten
from taskguard.policy import check_namespace

__all__ = ["Former", "Shape", "former_ids", "formers_of", "prefix_of", "work_id"]

# With a message's id it is in one index, which on MariaDB and MySQL holds 768 characters.
_MAX_WORK_BYTES = 500
_MOST = 8


def work_id(task: str, value: str) -> str:
    """The id of a work: (task, value), readable and unambiguous; at most 500 bytes.

    Keys hold no blanks, so the last blank parts the two. A longer one is shortened as keys are:
    every database's indexes have a limit.
    """
    return shorten(f"{task} {value}", limit_bytes=_MAX_WORK_BYTES)


def prefix_of(namespace: str) -> str:
    """What a namespace puts before keys and work ids."""
    return f"{namespace}:" if namespace else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """How a guard was declared before. An argument that is left out was as it is now.

    Attributes:
        task: the task's name, or its `work=` where it had one.
        key: its `key=`, in terms of the arguments that the function has now. A call of whose
            arguments it makes no key has no former work.
        once_per: its `once_per=`.
        namespace: its namespace, the application's where the task had none of its own; "": none.
    """

    task: str | None = None
    key: Any = None
    once_per: str | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        if all(each is None for each in (self.task, self.key, self.once_per, self.namespace)):
            raise ConfigurationError(
                "Former() says nothing: name what has changed, by task=, key=, once_per= or "
                "namespace=."
            )
        if self.namespace is not None:
            check_namespace(self.namespace)


@dataclass(frozen=True, slots=True)
class Shape:
    """What makes a call's keys and its work's id.

    Attributes:
        keys: makes the keys.
        once_per: makes the value that counts as the same work; None: the keys do, or the message.
        by_message: whether each message is work of its own (`once_per="message"`).
        work: the first part of the work's id; None: the task's name.
        namespace: None: the application's.
    """

    keys: KeyFunction
    once_per: KeyFunction | None
    by_message: bool
    work: str | None
    namespace: str | None

    @classmethod
    def of(
        cls,
        *,
        key: KeyFunction,
        once_per: str,
        work: str | None,
        namespace: str | None,
        signature: inspect.Signature,
        task: str,
    ) -> Shape:
        """Compile `once_per`."""
        named = None
        if once_per not in ("key", "message"):
            named = compile_key(once_per, signature=signature, task=task)
        return cls(key, named, once_per == "message", work, namespace)

    def ids(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task: str,
        message: MessageRef,
        namespace: str,
    ) -> tuple[tuple[str, ...], str]:
        """The keys of a call, sorted, and its work's id.

        Raises KeyArgumentError or TypeError for its arguments.
        """
        prefix = prefix_of(namespace if self.namespace is None else self.namespace)
        found = self.keys.found(args, kwargs)
        value = prefix + found.name
        if self.by_message:
            # The keys are part of the id, too: one message id may be used for several keys.
            value = f"{prefix}message:{message.id} {value}"
        elif self.once_per is not None:
            value = prefix + self.once_per.found(args, kwargs).name
        return tuple(prefix + key for key in found.keys), work_id(self.work or task, value)


def formers_of(
    given: Any, now: Shape, *, once_per: str, signature: inspect.Signature, task: str
) -> tuple[Shape, ...]:
    """The shapes that a guard had before. Raises ConfigurationError or KeyTemplateError."""
    formers = (given,) if isinstance(given, Former) else tuple(given)
    wrong = next((each for each in formers if not isinstance(each, Former)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"{task}: formerly={wrong!r}: give a taskguard.Former, or several, for example "
            'formerly=Former(key="order:<order_id>").'
        )
    if len(formers) > _MOST:
        raise ConfigurationError(
            f"{task}: formerly= has {len(formers)} shapes, and each is looked at by every claim: "
            f"at most {_MOST}. Leave out those whose work is older than retention_s."
        )
    return tuple(
        Shape.of(
            key=now.keys
            if former.key is None
            else compile_key(former.key, signature=signature, task=task),
            once_per=once_per if former.once_per is None else former.once_per,
            work=now.work if former.task is None else former.task,
            namespace=now.namespace if former.namespace is None else former.namespace,
            signature=signature,
            task=task,
        )
        for former in formers
    )


def former_ids(
    shapes: Sequence[Shape], args: Sequence[Any], kwargs: Mapping[str, Any], **values: Any
) -> list[tuple[tuple[str, ...], str]]:
    """Keys and work of a call in each former shape that has any for it."""
    found = []
    for shape in shapes:
        try:
            found.append(shape.ids(args, kwargs, **values))
        except KeyArgumentError:
            continue  # no key then, so there is no former work
    return found
