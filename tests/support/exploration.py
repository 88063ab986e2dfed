"""How many cases a run tries: a limited number in `make test`, all of them in `make explore`.

Choices depend only on the seed, which is 1 in `make test`. `make explore` tries everything that
`make test` does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Exploration"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Exploration:
    """The number of cases for a test that could run for hours.

    Attributes:
        seed: for all random choices.
        whole: try all cases.
    """

    seed: int = 1
    whole: bool = False

    def pick(self, each: Sequence[_T], at_most: int) -> list[_T]:
        """Return all of them, or at most this many, in their order."""
        if self.whole or len(each) <= at_most:
            return list(each)
        numbers = random.Random(self.seed).sample(range(len(each)), at_most)
        return [each[number] for number in sorted(numbers)]

    def numbers(self, step: int) -> Iterator[int]:
        """1, 2, 3 and so on; or each `step`th of them, the first one drawn."""
        at = 1 if self.whole else random.Random(self.seed).randint(1, step)
        while True:
            yield at
            at += 1 if self.whole else step

    def amount(self, bounded: int, whole: int) -> int:
        """Return the amount for a test without an end."""
        return whole if self.whole else bounded
