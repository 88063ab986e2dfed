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

from typing import Any

from taskguard.errors import ConfigurationError
from taskguard.model.policy import check_namespace
from taskguard.values import value

__all__ = ["Former", "formers_in"]

_MOST = 8


@value(kw_only=True)
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


def formers_in(given: Any, *, task: str) -> tuple[Former, ...]:
    """The option `formerly=` of a task, checked. Raises ConfigurationError."""
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
    return formers
