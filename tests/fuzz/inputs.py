"""The inputs: templates, arguments and results of callables, made from choices.

Choices come from bytes (`FromBytes`: atheris, and replays of what it found) or from Hypothesis
(`test_fuzz.py`); the rest does not know which. Where the text of an argument is known, it comes
with it, computed independently of the library. None means that a key and a refusal are both right.

Guarantees: the same choices make the same input.
Does not guarantee: that a text without a key is refused for the right reason; that is what
`tests/unit/test_keys.py` is for.

Read next: `properties.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import UserString, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum
from numbers import Integral
from types import SimpleNamespace
from typing import Protocol, TypeVar
from urllib.parse import quote
from uuid import UUID

from pydantic import BaseModel, SecretStr

__all__ = [
    "Call",
    "Choices",
    "FromBytes",
    "OwnError",
    "Plan",
    "any_calls",
    "any_result",
    "any_spec",
    "any_template",
    "any_value",
    "pick",
    "planned",
]

T = TypeVar("T")


class Choices(Protocol):
    """The source of an input."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""

    def text(self, alphabet: str | None, max_chars: int) -> str:
        """Text of these characters; of all that Python has, lone surrogates too, if None."""


class FromBytes:
    """Choices read from bytes, front to back; when they are used up, the lowest ones."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer(self, low: int, high: int) -> int:
        size = ((high - low).bit_length() + 7) // 8
        return low + int.from_bytes(self._take(size), "little") % (high - low + 1)

    def text(self, alphabet: str | None, max_chars: int) -> str:
        taken = self._take(self.integer(0, max_chars))
        if alphabet is None:
            return taken.decode(errors="surrogateescape")
        return "".join(alphabet[byte % len(alphabet)] for byte in taken)

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken


def pick(choices: Choices, options: Sequence[T]) -> T:
    """One of `options`."""
    return options[choices.integer(0, len(options) - 1)]


class OwnError(Exception):
    """Raised by an argument's own code: it goes on unchanged."""


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "loud"

    def __format__(self, spec: str) -> str:
        return "loud"

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return True


class Unusable(str):
    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise OwnError

    def __str__(self) -> str:
        raise OwnError


class LoudInt(int):
    def __str__(self) -> str:
        return "loud"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return "loud"


class LoudDate(date):
    def isoformat(self) -> str:
        return "loud"

    def strftime(self, spec: str) -> str:
        return "loud"


class Colour(Enum):
    RED = "red"
    BLUE = "b lue:"
    NONE = None


class TextColour(str, Enum):  # noqa: UP042  # as users write it
    RED = "red"

    def __str__(self) -> str:
        return "never this"


class Level(IntEnum):
    LOW = -1
    HIGH = 3


class Nested(Enum):
    COLOUR = Colour.RED
    PAIR = (1, 2)


class Raising:
    """Every way in is an error of its own."""

    def __str__(self) -> str:
        raise OwnError

    def __format__(self, spec: str) -> str:
        raise OwnError

    def __getattr__(self, name: str) -> object:
        raise OwnError

    def __getitem__(self, item: object) -> object:
        raise OwnError

    def __iter__(self) -> Iterator[object]:
        raise OwnError

    def __len__(self) -> int:
        raise OwnError

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise OwnError


class Saying:
    """An object whose `str()`, attributes and items are what it was given."""

    def __init__(self, said: object) -> None:
        self.id = said

    def __str__(self) -> str:
        return self.id  # type: ignore[return-value]

    def __getitem__(self, item: object) -> object:
        return self.id


class Number:
    """Another library's integer."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value  # type: ignore[return-value]


Integral.register(Number)


class Order(BaseModel):
    id: int
    sku: str = "a b"
    secret: SecretStr = SecretStr("秘密")


class OddZone(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        raise OwnError


def _cyclic_list() -> list[object]:
    cyclic: list[object] = ["a"]
    cyclic.append(cyclic)
    return cyclic


def _cyclic_dict() -> dict[str, object]:
    cyclic: dict[str, object] = {}
    cyclic.update(id=cyclic, sku=cyclic)
    return cyclic


def _deep(levels: int = 100_000) -> object:
    deep: object = "a"
    for _ in range(levels):
        deep = [deep]
    return deep


def _released() -> memoryview:
    view = memoryview(b"abcd")
    view.release()
    return view


_HUGE_TEXT = "x" * 5_000_000
_HUGE_SURROGATES = "\ud800" * 2_000_000
_HUGE_INT = 1 << 40_000_000
_HUGE_DECIMAL = Decimal((0, (1,) * 500_000, 0))
_DEEP = _deep()
_LONGEST = 65_536
# As slow as a text gets: four bytes a character, or a separator after every one.
_COSTLY = ("😀" * _LONGEST, "é:" * (_LONGEST // 2), "a" * _LONGEST, "%/" * (_LONGEST // 2))

_ODD: tuple[Callable[[], object], ...] = (
    lambda: None,
    lambda: "",
    lambda: Loud("a"),
    lambda: Unusable("a"),
    lambda: _HUGE_TEXT,
    lambda: Loud(_HUGE_TEXT[:100_000]),
    lambda: _HUGE_SURROGATES,
    lambda: _HUGE_INT,
    lambda: -_HUGE_INT,
    lambda: 10**5000,
    lambda: LoudInt(10**5000),
    lambda: 1 << 2047,
    lambda: _HUGE_DECIMAL,
    lambda: Decimal("1e999999999"),
    lambda: Decimal("-1e-999999999"),
    lambda: Decimal("0E+999999"),
    lambda: Decimal("1e1000"),
    lambda: Decimal("1." + "1" * 60_000),
    lambda: Decimal("sNaN12"),
    lambda: Decimal("-Infinity"),
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 5e-324,
    lambda: 1.7976931348623157e308,
    lambda: 1j,
    lambda: b"bytes",
    lambda: bytearray(b"bytes"),
    lambda: memoryview(b"abcd"),
    lambda: memoryview(b"abcd").cast("B", [2, 2]),
    _released,
    lambda: [1, "a"],
    lambda: (),
    lambda: {"id": 1, "sku": "a", "0": "b"},
    lambda: {0: "number", (1,): "tuple"},
    lambda: defaultdict(list),
    lambda: deque([1]),
    lambda: range(10**30),
    lambda: frozenset([1]),
    lambda: UserString("a"),
    _cyclic_list,
    _cyclic_dict,
    lambda: _DEEP,
    Raising,
    lambda: Saying("said: é"),
    lambda: Saying(Loud("said")),
    lambda: Saying(""),
    lambda: Saying(5),
    lambda: Saying(None),
    lambda: Saying(b"said"),
    lambda: Saying(_HUGE_TEXT),
    lambda: Saying("\udcff"),
    lambda: Number(7),
    lambda: Number(_HUGE_INT),
    lambda: Order(id=1),
    lambda: Order(id=1).secret,
    lambda: Order,
    lambda: SimpleNamespace(id=1),
    lambda: Colour.NONE,
    lambda: Nested.PAIR,
    lambda: Colour,
    lambda: timedelta(1),
    lambda: datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=23, microseconds=1))),
    lambda: datetime(2024, 1, 1, tzinfo=OddZone()),
    lambda: time(1, 2, 3, tzinfo=OddZone()),
    lambda: date(1, 1, 1),
    lambda: LoudDate(9, 9, 9),
    lambda: datetime.max.replace(tzinfo=UTC),
    lambda: time(23, 59, 59, 999_999),
    lambda: ValueError("said"),
    lambda: OwnError("said"),
    lambda: len,
    lambda: (n for n in "ab"),
    object,
    lambda: ...,
    lambda: slice(1, 2),
)

# Few characters, and those that a naive join or encoding would confuse: they meet often.
_TRICKY = "ab_:/%~2é{ 0<>*\n\x00-.\u0301A"


@dataclass(frozen=True)
class Value:
    """A value, and its text where that is known."""

    value: object
    text: str | None = None


def _text(choices: Choices) -> Value:
    kind = choices.integer(0, 9)
    if kind < 4:
        text = choices.text(_TRICKY, 6)
    elif kind < 6:
        text = choices.text(None, 12)
    elif kind < 8:  # most differ only where a shortened key has been cut off
        text = "a" * choices.integer(140, 220) + choices.text(_TRICKY, 3)
    elif kind < 9:
        text = choices.text(_TRICKY, 3) * choices.integer(1, 100)
    else:
        text = pick(choices, _COSTLY)[: _LONGEST - 3] + choices.text(_TRICKY, 3)
    value = Loud(text) if choices.integer(0, 9) == 9 else text
    return Value(value, text if text and _is_storable(text) else None)


def _is_storable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _integer(choices: Choices) -> Value:
    bits = pick(choices, (4, 8, 64, 2000))
    number = choices.integer(-(2**bits), 2**bits)
    return Value(pick(choices, (int, LoudInt, Number))(number), str(number))


def _float(choices: Choices) -> Value:
    number: float = struct.unpack("<d", struct.pack("<Q", choices.integer(0, 2**64 - 1)))[0]
    if choices.integer(0, 3):
        number = pick(choices, (0.0, -0.0, 1.0, 1e16, 1e-7, 0.1, 2.5))
    is_finite = number - number == 0
    return Value(number, repr(number) if is_finite else None)


def _decimal(choices: Choices) -> Value:
    digits = tuple(choices.integer(0, 9) for _ in range(choices.integer(1, 30)))
    number = Decimal((choices.integer(0, 1), digits, choices.integer(-40, 40)))
    return Value(number, str(number))


def _year(choices: Choices) -> int:
    return choices.integer(1, 9999) if choices.integer(0, 1) else choices.integer(1, 1100)


def _date(choices: Choices) -> Value:
    kind = pick(choices, (date, LoudDate))
    day = kind(_year(choices), choices.integer(1, 12), choices.integer(1, 28))
    return Value(day, f"{day.year:04}-{day.month:02}-{day.day:02}")


def _datetime(choices: Choices) -> Value:
    moment = datetime(  # noqa: DTZ001 - naive ones are arguments too
        _year(choices),
        choices.integer(1, 12),
        choices.integer(1, 28),
        choices.integer(0, 23),
        choices.integer(0, 59),
        choices.integer(0, 59),
        choices.integer(0, 1) * choices.integer(0, 999_999),
    )
    if choices.integer(0, 1):
        offset = timezone(timedelta(minutes=choices.integer(-1439, 1439)))
        moment = moment.replace(tzinfo=offset)
    return Value(moment, moment.isoformat())


def _time(choices: Choices) -> Value:
    moment = time(choices.integer(0, 23), choices.integer(0, 59), choices.integer(0, 59))
    return Value(moment, f"{moment.hour:02}:{moment.minute:02}:{moment.second:02}")


def _member(choices: Choices) -> Value:
    members: tuple[tuple[object, str], ...] = (
        (True, "True"),
        (False, "False"),
        (Colour.RED, "red"),
        (Colour.BLUE, "b lue:"),
        (TextColour.RED, "red"),
        (Level.LOW, "-1"),
        (Nested.COLOUR, "red"),
        ("True", "True"),
        ("1", "1"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    )
    return Value(*pick(choices, members))


_SCALARS = (_text, _text, _text, _integer, _float, _decimal, _date, _datetime, _time, _member)


def _scalar(choices: Choices) -> Value:
    return pick(choices, _SCALARS)(choices)


def any_value(choices: Choices) -> object:
    """Anything that may come as an argument."""
    kind = choices.integer(0, 5)
    if kind < 3:
        return pick(choices, _ODD)()
    if kind < 5:
        return _scalar(choices).value
    return pick(choices, _SHAPES)[1](any_value(choices))


# How a placeholder goes on, and what an argument looks like for it.
_SHAPES: tuple[tuple[str, Callable[[object], object]], ...] = (
    ("", lambda value: value),
    (".id", lambda value: SimpleNamespace(id=value)),
    ("[sku]", lambda value: {"sku": value}),
    ("[0]", lambda value: (value,)),
    ("[-1]", lambda value: [None, value]),
    ("[7]", lambda value: {7: value}),
    ("[a b:|{].id", lambda value: {"a b:|{": Saying(value)}),
    ("[0][0]", lambda value: [{0: value}]),
)


def _by_date(form: Callable[[date], str]) -> Callable[[Choices], Value]:
    def draw(choices: Choices) -> Value:
        day = pick(choices, (_date, _datetime))(choices).value
        assert isinstance(day, date)
        return Value(day, form(day))

    return draw


_FORMATS: tuple[tuple[str, Callable[[Choices], Value]], ...] = (
    ("%Y-%m-%d", _by_date(lambda d: f"{d.year:04}-{d.month:02}-{d.day:02}")),
    ("%F", _by_date(lambda d: f"{d.year:04}-{d.month:02}-{d.day:02}")),
    ("%Y%j", _by_date(lambda d: f"{d.year:04}{d.timetuple().tm_yday:03}")),
    ("%Y年%m", _by_date(lambda d: f"{d.year:04}年{d.month:02}")),
    ("%G/%V", _by_date(lambda d: "{:04}/{:02}".format(*d.isocalendar()))),
)


@dataclass(frozen=True)
class Call:
    """One call's arguments, each placeholder's text, and the key, unless it has to be shortened.

    None where a text is unknown.
    """

    arguments: Mapping[str, object]
    texts: tuple[str, ...] | None = None
    whole_key: str | None = None


@dataclass(frozen=True)
class _Placeholder:
    source: str
    shape: Callable[[object], object]
    draw: Callable[[Choices], Value]

    def value(self, choices: Choices) -> Value:
        drawn = self.draw(choices)
        return Value(self.shape(drawn.value), drawn.text)

    def part(self, text: str) -> str:
        """Return the part of a key for this text."""
        if "|hash" in self.source:
            return hashlib.sha256(text.encode()).hexdigest()[:32]
        return quote(text, safe="-_.~@+")


_NAMES = ("x", "y", "z")


def _placeholder(choices: Choices, name: str) -> _Placeholder:
    path, shape = pick(choices, _SHAPES)
    filters = pick(choices, ("", "", "", "|hash", "|str", "|str|hash"))
    draw: Callable[[Choices], Value] = _scalar
    if "|str" not in filters and choices.integer(0, 2) == 0:
        spec, draw = pick(choices, _FORMATS)
        filters = f":{spec}{filters}"
    return _Placeholder(f"<{name}{path}{filters}>", shape, draw)


@dataclass(frozen=True)
class Plan:
    """A template made of its parts. `literals` are around and between the placeholders."""

    placeholders: Sequence[_Placeholder]
    literals: Sequence[str]

    @property
    def template(self) -> str:
        """Return the template as a user would write it."""
        return self._joined([p.source for p in self.placeholders])

    @property
    def is_right(self) -> bool:
        """Return True if no value can contain the text between two placeholders."""
        return not {"", "_"}.intersection(self.literals[1:-1])

    def call(self, values: Sequence[Value]) -> Call:
        """A call with these values."""
        arguments = dict(zip(_NAMES, (v.value for v in values), strict=False))
        texts = tuple(v.text for v in values if v.text is not None)
        if len(texts) < len(values):
            return Call(arguments)
        parts = [p.part(text) for p, text in zip(self.placeholders, texts, strict=True)]
        return Call(arguments, texts, self._joined(parts).replace("<<", "<"))

    def _joined(self, parts: Sequence[str]) -> str:
        pairs = zip(parts, self.literals[1:], strict=True)
        return self.literals[0] + "".join(part + literal for part, literal in pairs)


def planned(choices: Choices) -> tuple[Plan, list[Call]]:
    """A template, and calls whose texts are known, some of them near each other."""
    placeholders = [_placeholder(choices, n) for n in _NAMES[: choices.integer(1, len(_NAMES))]]
    between = [
        pick(choices, (":", "/", "_:_", "é", "a,a", "[#", "<<", "_", "")) for _ in placeholders
    ]
    first, last = pick(choices, ("", "k:", "a", "ü<<")), pick(choices, ("", "z", ":z", "年"))
    plan = Plan(placeholders, (first, *between[1:], last))
    calls = [
        plan.call([p.value(choices) for p in placeholders]) for _ in range(choices.integer(1, 3))
    ]
    texts = calls[0].texts
    if texts is not None and len(texts) > 1 and all(p.draw is _scalar for p in placeholders):
        # The same characters, the first argument's last one moved into the second argument.
        moved = (texts[0][:-1] or "0", texts[0][-1] + texts[1], *texts[2:])
        if len(moved[1]) <= _LONGEST:
            shaped = zip(placeholders, moved, strict=True)
            calls.append(plan.call([Value(p.shape(text), text) for p, text in shaped]))
    return plan, calls


_PIECES = (
    "<x>", "<y>", "<z>", "<x|hash>", "<x|str>", "<x:%Y-%m>", "<x:05d>", "<x[0]>", "<x.id>", "<<",
    "<", ">", ":", "/", "|", "[", "]", ".", "%", "{", "<x:", "|hash", "|str", "%Y", "%", "\x00",
    "\ud800", "<y[a\n]>", "<x:%Y\x00%m>", "<x:.2f>", "<x.__class__.__name__>", "<guard>",
    "<x:%H\ud800>", "<kw[a]>", "<rest[0]>",
)  # fmt: skip


def any_template(choices: Choices) -> str:
    """Any text: pieces of templates among others, sometimes many of them."""
    pieces = [
        pick(choices, _PIECES) if choices.integer(0, 2) else choices.text(None, 8)
        for _ in range(choices.integer(0, 6))
    ]
    text = "".join(pieces)
    return text * pick(choices, (1, 1, 1, 1, 1, 1, 1, 3, 100, 100_000))


def any_calls(choices: Choices) -> list[Call]:
    """Calls with anything."""
    return [Call({name: any_value(choices) for name in _NAMES}) for _ in range(2)]


def any_spec(choices: Choices) -> object:
    """Anything as a key option."""
    kind = choices.integer(0, 3)
    if kind == 0:
        return [any_template(choices) for _ in range(choices.integer(0, 3))]
    if kind == 1:
        return [any_value(choices)]
    if kind == 2:
        return ["<x>"] * choices.integer(0, 200_000)
    return any_value(choices)


def any_result(choices: Choices) -> object:
    """Anything that a key callable may return."""
    kind = choices.integer(0, 5)
    if kind == 0:
        return any_value(choices)
    if kind == 1:
        return itertools.cycle([_scalar(choices).value for _ in range(choices.integer(1, 3))])
    if kind == 2:
        costly = pick(choices, _COSTLY)
        return [costly[n:] for n in range(choices.integer(1, 12))]
    if kind == 3:
        return [any_value(choices) for _ in range(choices.integer(0, 3))]
    return [_text(choices).value for _ in range(choices.integer(1, 4))]
