"""How far a run looks: a bounded part in `make test`, everything in `make explore`.

Guarantees: what is drawn depends on the seed alone, which is 1 in `make test`. Nothing that a
bounded run tries is left out by one that explores.
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
    """What a test asks that could go on for hours.

    Attributes:
        seed: of whatever is drawn.
        whole: nothing is left out.
    """

    seed: int = 1
    whole: bool = False

    def pick(self, each: Sequence[_T], at_most: int) -> list[_T]:
        """All of them, or so many, in their order."""
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
        """How many of something that never ends."""
        return whole if self.whole else bounded
