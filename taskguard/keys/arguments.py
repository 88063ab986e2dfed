"""A call's arguments by name, defaults applied, and the names that a template may use.

Guarantees: `bind` takes exactly the calls that the signature takes, and raises a `TypeError` for
the others, with `inspect`'s words.
Does not guarantee: anything about values; they are passed on untouched.

Read next: `function.py`, which fills templates from what is bound here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence

from taskguard.keys.template import Placeholder, TemplateProblemError

__all__ = ["Arguments", "check_name"]

_Parameter = inspect.Parameter


def check_name(placeholder: Placeholder, names: Collection[str]) -> None:
    """Raise TemplateProblemError unless `placeholder` names one of `names`."""
    if placeholder.name in names:
        return
    import difflib

    close = difflib.get_close_matches(placeholder.name, names, n=1)
    hint = f" (did you mean <{close[0]}>?)" if close else ""
    raise TemplateProblemError(f"{placeholder.source} is not one of the arguments{hint}")


class Arguments:
    """Binds calls to a signature, without `inspect` where the arguments are plain.

    `Signature.bind` costs several times what the rest of a key costs. For a signature without
    `*args` and `**kwargs` it is enough to know, for each number of positional arguments, which
    names must and which may come by keyword.
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
        """Every parameter's value by its name; what `**kwargs` collects by its own names too."""
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
        if self.var_keyword is None:  # else any name may come
            check_name(placeholder, self.parameters)

    def describe(self) -> str:
        """The parameters as a person would list them."""
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
