"""Keys: what holds for all arguments. Each property is one of `taskguard.keys`' guarantees."""

from __future__ import annotations

import inspect
import pickle
import re
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from types import SimpleNamespace
from uuid import UUID

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from kombu.utils import json as kombu_json

from taskguard.errors import KeyArgumentError, KeyTemplateError
from taskguard.keys import MAX_KEY_BYTES, compile_key, encode_value, key


def for_all(*strategies, **named):
    """Return `given` without a deadline, because a machine may be slow."""
    return lambda test: settings(deadline=None)(given(*strategies, **named)(test))


# Few characters, and those that a naive join or encoding would confuse: they meet often.
TRICKY = st.text("ab_:/%~2é{ 0", min_size=1, max_size=6)
# Most differ only where a shortened key has been cut off.
LONG = st.builds(lambda head, tail: "a" * head + tail, st.integers(150, 220), TRICKY)
TEXTS = st.one_of(
    TRICKY, TRICKY, LONG, st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
)
TEMPLATES = st.sampled_from(
    [
        "<x>:<y>",
        "<x>/<y>",
        "k:<x>_:_<y>z",
        "a<x>#a<y>a",
        "<x|hash>:<y>",
        "k/<x>/<y|hash>",
        "<y>:<x>:<y>",
        "ü<<<x>,%s<y>".replace("%s", "é"),
    ]
)


class Colour(Enum):
    RED = "red"
    BLUE = "b lue"


class TextColour(str, Enum):  # noqa: UP042  # as users write it
    RED = "red"

    def __str__(self):
        return "never this"


class Level(IntEnum):
    LOW = -1
    HIGH = 3


class Loud(str):
    __slots__ = ()

    def __str__(self):
        return "loud"


FIXED_ZONES = st.builds(
    timezone, st.timedeltas(min_value=timedelta(hours=-23), max_value=timedelta(hours=23))
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False),
)
MOMENTS = st.one_of(
    st.dates(), st.times(), st.datetimes(), st.datetimes(timezones=st.none() | FIXED_ZONES)
)
# Values that kombu's JSON sends unchanged or restores.
SENDABLE = st.one_of(
    NUMBERS,
    MOMENTS,
    st.booleans(),
    st.uuids(),
    TEXTS,
    TEXTS.map(Loud),
    st.sampled_from([*Level, *TextColour]),
)
KEYABLE = st.one_of(SENDABLE, st.sampled_from(Colour))
ANYTHING = st.recursive(
    st.one_of(
        KEYABLE,
        st.none(),
        st.text(),
        st.text(st.characters(categories=["Cs"]), min_size=1),
        st.binary(),
        st.floats(),
        st.decimals(),
        st.complex_numbers(),
        st.timedeltas(),
        st.functions(),
        st.builds(object),
        st.sampled_from(
            [int, Colour, len, ..., NotImplemented, inspect, range(3), bytearray(b"x")]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.sampled_from(["id", "sku", "0", 0, 7]), inner, max_size=3),
        st.builds(SimpleNamespace, id=inner),
        inner.map(ValueError),
    ),
    max_leaves=4,
)
ANY_TEMPLATES = st.sampled_from(
    [
        "<x>",
        "k:<x|hash>",
        "<x|str>",
        "<x.id>",
        "<x[sku]>:<x[0]>",
        "<x[7]>",
        "<x:%Y-%m-%d>",
        "<x:%Y|hash>",
        "<x|str|hash>",
    ]
)


def text_for(value: object) -> str:
    """Return the text of a value, computed without the library."""
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        return "".join(value)
    return repr(value) if isinstance(value, float) else str(value)


def key_or_none(template: str, value: object) -> str | None:
    try:
        return key(template, x=value)
    except KeyArgumentError:
        return None


def assert_well_formed(text: str) -> None:
    """Check that a key is short and printable, and that each `%` is an escape or begins the mark of
    a shortened key."""
    assert 0 < len(text.encode()) <= MAX_KEY_BYTES
    assert text.isprintable()
    assert not re.search(r"[\s{}]", text)
    assert re.fullmatch(r"(?:[^%]|%[0-9A-F]{2})*(?:%~[0-9a-f]{32})?", text)


@for_all(TEMPLATES, st.tuples(KEYABLE, KEYABLE), st.tuples(KEYABLE, KEYABLE))
@example("<x>:<y>", ("a_b", "c"), ("a", "b_c"))
@example("<x>:<y>", ("a:b", "c"), ("a", "b:c"))
@example("<x>:<y>", ("a%3Ab", "c"), ("a:b", "c"))
@example("<x>:<y>", (42, "1"), ("42", 1))
@example("<x>:<y>", ("a" * 300, "b"), ("a" * 299, "b"))
def test_one_key_exactly_where_the_texts_agree(template, first, second):
    """Arguments whose texts differ get different keys; equal texts get equal keys."""
    keys = [key(template, x=x, y=y) for x, y in (first, second)]
    texts = [(text_for(x), text_for(y)) for x, y in (first, second)]
    assert (keys[0] == keys[1]) == (texts[0] == texts[1])
    for made in keys:
        assert_well_formed(made)


@for_all(TEMPLATES, TEXTS, TEXTS, st.integers(0, 6))
def test_moving_the_boundary_makes_another_key(template, x, y, moved):
    """If characters move from the end of one argument to the beginning of the next, the key is
    another one."""
    cut = len(x) - moved
    assume(0 < cut < len(x))
    assert key(template, x=x, y=y) != key(template, x=x[:cut], y=x[cut:] + y)


@for_all(TEXTS, TEXTS)
def test_a_key_reads_back(x, y):
    """Percent-decoding the parts of a key that is not shortened returns the texts."""
    from urllib.parse import unquote

    made = key("<x>:<y>", x=x, y=y)
    assume("%~" not in made)
    assert [unquote(part) for part in made.split(":")] == [x, y]


@for_all(KEYABLE)
def test_values_meet_their_texts(value):
    """A value and its text make the same key, plain and hashed."""
    for template in ("k:<x>", "k:<x|hash>"):
        assert key(template, x=value) == key(template, x=text_for(value))
    assert key("<x>", x=value)[:100] == encode_value(value)[:100]


@pytest.mark.parametrize(
    "send",
    [
        lambda value: kombu_json.loads(kombu_json.dumps(value)),
        lambda v: pickle.loads(pickle.dumps(v)),
    ],
    ids=["json", "pickle"],
)
@for_all(template=ANY_TEMPLATES, value=st.one_of(SENDABLE, st.lists(SENDABLE, max_size=2)))
def test_the_workers_key_is_the_producers(send, template, value):
    """An argument makes the same key at the producer and at the worker."""
    assert key_or_none(template, send(value)) == key_or_none(template, value)


@for_all(
    st.sampled_from(["<x[7]>", "<x[sku]>", "<x[a][0]>"]),
    st.one_of(
        st.dictionaries(st.sampled_from(["7", "sku"]), SENDABLE),
        st.dictionaries(st.just(7), SENDABLE),
        st.fixed_dictionaries({"a": st.tuples(SENDABLE)}),
    ),
)
def test_items_survive_json(template, value):
    """JSON makes lists of tuples and text of a dict's numbers. Their items are still found."""
    sent = kombu_json.loads(kombu_json.dumps(value))
    assert key_or_none(template, sent) == key_or_none(template, value)


@for_all(ANY_TEMPLATES, st.sampled_from(Colour))
def test_enums_survive_pickle(template, value):
    """An Enum that JSON cannot send is the same after pickle."""
    assert key_or_none(template, pickle.loads(pickle.dumps(value))) == key_or_none(template, value)


@for_all(ANY_TEMPLATES, ANYTHING)
def test_a_key_or_the_documented_error(template, value):
    """No argument makes anything but a well-formed key or a KeyArgumentError."""
    made = key_or_none(template, value)
    if made is not None:
        assert_well_formed(made)


@for_all(st.text("<>|:.[]%{}~/xyz0YZdf hashstr\n\x00é\ud800", max_size=20), ANYTHING)
@example("<x>:<y>", 1)
def test_any_template(template, value):
    """Any text as a template makes well-formed keys, or raises KeyTemplateError or
    KeyArgumentError."""
    signature = inspect.signature(lambda x, y=1, z="z": None)
    try:
        keys = compile_key(template, signature=signature, task="t")
    except KeyTemplateError as error:
        assert "Parameters: x, y, z." in str(error)  # noqa: PT017 - one of two outcomes
        return
    try:
        made = keys((value,), {})
    except KeyArgumentError:
        return
    assert_well_formed(made[0])
    assert made == (key(template, x=value, y=1, z="z"),)


@for_all(ANYTHING)
def test_any_result_of_a_callable(result):
    """A callable's result becomes sorted, well-formed keys or a KeyArgumentError."""
    keys = compile_key(lambda: result, signature=inspect.Signature(), task="t")
    try:
        made = keys((), {})
    except KeyArgumentError:
        return
    assert list(made) == sorted(set(made))
    for text in made:
        assert_well_formed(text)


# Letters that no message, type name or digest has.
SECRETS = st.text("秘密鍵値語", min_size=4)


@for_all(
    st.sampled_from(
        [
            "<x|hash>",
            "<x|str|hash>",
            "<x:%Y|hash>",
            "<x.id|hash>",
            "<x[0]|hash>",
            "<x[id]|hash>",
            "<x[id][id]|hash>",
        ]
    ),
    SECRETS,
    st.sampled_from(
        [
            str,
            Loud,
            str.encode,
            lambda s: [s],
            lambda s: {"id": s},
            lambda s: {s: s},
            lambda s: SimpleNamespace(id=s),
            lambda s: s + "\ud800",
            lambda s: s * 20_000,
            ValueError,
            lambda s: Decimal(len(s)) / 7,
        ]
    ),
)
def test_a_hashed_value_is_never_seen(template, secret, wrap):
    """A value marked `|hash` is in no key, error or repr, whatever goes wrong."""
    keys = compile_key(template, signature=inspect.signature(lambda x: None), task="t")
    try:
        seen = repr(keys((wrap(secret),), {}))
    except KeyArgumentError as error:
        assert error.__cause__ is None  # noqa: PT017 - one of two outcomes
        assert error.__context__ is None  # noqa: PT017
        seen = f"{error} {error!r} {vars(error)}"
    seen += repr(keys)
    assert secret not in seen
    assert ascii(secret).strip("'") not in seen


def plain(a, b=2, guard=None, *, c=3): ...
def required(a, /, b, *, c): ...
def collecting(a, b=2, *rest, c=3, **options): ...
def open_ended(a, **b): ...


@for_all(
    st.sampled_from([plain, required, collecting, open_ended]),
    st.lists(st.integers(0, 9), max_size=4),
    st.dictionaries(st.sampled_from(["a", "b", "c", "d", "guard"]), st.integers(0, 9)),
)
def test_binding_is_pythons(function, args, kwargs):
    """Arguments fit, and reach placeholders, exactly as `inspect` binds them."""
    signature = inspect.signature(function)
    signature = signature.replace(
        parameters=[p for n, p in signature.parameters.items() if n != "guard"]
    )
    keys = compile_key("<a>", signature=inspect.signature(function), task="t")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            keys(args, kwargs)
        return
    assert keys(args, kwargs) == (str(bound.arguments["a"]),)


@for_all(st.lists(TEXTS, min_size=1, max_size=5), st.randoms())
def test_one_order_for_all_owners(texts, random):
    """Several keys are sorted by code point, whatever their order in the call."""
    shuffled = random.sample(texts, len(texts))
    made = [
        compile_key(
            [f"k:<a[{n}]>" for n in range(len(texts))],
            signature=inspect.signature(lambda a: None),
            task="t",
        )((order,), {})
        for order in (texts, shuffled)
    ]
    assert made[0] == made[1]
    assert list(made[0]) == sorted(made[0], key=str.encode)


@for_all(st.lists(TEXTS, min_size=3, max_size=3), st.lists(TEXTS, min_size=3, max_size=3))
def test_a_name_of_several_keys_reads_back_to_one_call(one, other):
    """Calls that differ in one text, or in their order, are different work."""
    keys = compile_key(
        ["<a[0]>,<a[1]>", "<a[2]>"], signature=inspect.signature(lambda a: None), task="t"
    )
    first = keys.found((one,), {}).name
    assert (first == keys.found((other,), {}).name) is (one == other)
    assert (first == keys.found((one[1:] + one[:1],), {}).name) is (one == one[1:] + one[:1])


@for_all(st.uuids())
def test_a_uuid_is_its_usual_text(value: UUID):
    """A UUID is written in lower case with hyphens, which need no encoding."""
    assert key("k:<x>", x=value) == f"k:{value}"
