"""The former declaration of a guard that a deploy changed: `formerly=`.

The id of work is made of the task's name, `once_per` (by default the key) and the namespace. A
deploy that changes one of them gives all work new ids, under which nothing is on record. If a
message whose work is done is delivered again, it would have its effect twice.

    @guarded_task(key="shop:<shop>:order:<order_id>", formerly=Former(key="order:<order_id>"))

Guarantees: a claim holds the former keys as well. It reads and writes the record under each former
id, in its own transaction. So it and workers that still run with the former guard exclude each
other, and each finds what the other has done.

Read next: `states.speaking_record()` for which of several records counts, and
`docs/how-to/changing-a-guard.md` for what to do when.
"""

from __future__ import annotations

from typing import Any

from taskguard.errors import ConfigurationError
from taskguard.keys.function import KeySpec
from taskguard.model.policy import OncePer, check_namespace
from taskguard.values import value

__all__ = ["Former", "formers_in"]

_MOST = 8


@value(kw_only=True)
class Former:
    """A former declaration of a guard. An argument that is left out has not changed.

    Attributes:
        task: the task's name, or its `work=` if it had one.
        key: its `key=`, in terms of the function's present arguments. A call whose arguments make
            no such key has no former work.
        once_per: its `once_per=`.
        namespace: its namespace, or the application's if the task had none. "": none.
    """

    task: str | None = None
    key: KeySpec | None = None
    once_per: OncePer | KeySpec | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        if all(each is None for each in (self.task, self.key, self.once_per, self.namespace)):
            raise ConfigurationError(
                "Former() has no arguments: name what has changed by task=, key=, once_per= or "
                "namespace=."
            )
        if self.namespace is not None:
            check_namespace(self.namespace)


def formers_in(given: Any, *, task: str) -> tuple[Former, ...]:
    """Check the option `formerly=` of a task and return it. Raises ConfigurationError."""
    formers = (given,) if isinstance(given, Former) else tuple(given)
    wrong = next((each for each in formers if not isinstance(each, Former)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"{task}: formerly={wrong!r}: give a taskguard.Former, or several, for example "
            'formerly=Former(key="order:<order_id>").'
        )
    if len(formers) > _MOST:
        raise ConfigurationError(
            f"{task}: formerly= has {len(formers)} entries, and every claim reads each of them: "
            f"use {_MOST} at most. Remove those whose work is older than retention_s."
        )
    return formers
