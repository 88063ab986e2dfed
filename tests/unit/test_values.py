"""`@value`: a dataclass with shared methods."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field

import pytest

from taskguard.values import value


@value
class Point:
    """A value whose fields are not all shown and compared."""

    x: int
    y: int = 0
    secret: str = field(default="", repr=False, compare=False)


@value(kw_only=True)
class Named(Point):
    """A value that inherits fields."""

    name: str


def test_it_is_shown_compared_and_hashed_by_its_fields() -> None:
    """A field with `repr=False` is not shown, one with `compare=False` is not compared."""
    point = Point(1, secret="s3cret")
    assert repr(point) == "Point(x=1, y=0)"
    assert point == Point(1)
    assert hash(point) == hash(Point(1))
    assert point != Point(2)
    assert point != (1, 0)
    assert Named(1, name="a") != Point(1)
    assert repr(Named(1, name="a")) == "Named(x=1, y=0, name='a')"


def test_it_is_a_dataclass_without_a_dict() -> None:
    """`dataclasses` knows its fields. It can be copied and pickled; it has no other attribute."""
    point = Point(1, 2)
    assert dataclasses.replace(point, y=3) == Point(1, 3)
    assert dataclasses.asdict(point) == {"x": 1, "y": 2, "secret": ""}
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == point
    with pytest.raises(AttributeError):
        point.z = 1  # type: ignore[attr-defined]
