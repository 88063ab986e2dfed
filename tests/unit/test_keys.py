"""Keys: the rules of the documentation about templates, values and limits."""

from __future__ import annotations

import decimal
import hashlib
import inspect
import itertools
import pickle
import time as clock
import tracemalloc
from collections import defaultdict
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from numbers import Integral
from types import SimpleNamespace
from uuid import UUID

import pytest

from taskguard.errors import ConfigurationError, KeyArgumentError, KeyTemplateError
from taskguard.keys import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_TEXT_CHARS,
    KeyFunction,
    compile_key,
    encode_value,
    key,
    shorten,
)

# A task's argument may be naive: what matters is the text.
NOON = datetime(2024, 5, 1, 12, 30)  # noqa: DTZ001
SECRET = "ada@example.org"


def ship(order_id, region="eu", *, priority=1, guard=None): ...


def compiled(spec, function=ship, **options) -> KeyFunction:
    signature = inspect.signature(function)
    return compile_key(spec, signature=signature, task="shop.ship", **options)


def one(template: str, value: object) -> str:
    """The key of a single value called x."""
    return key(template, x=value)


def refusal(template: str, value: object) -> str:
    with pytest.raises(KeyArgumentError) as caught:
        one(template, value)
    assert caught.value.__cause__ is None
    return str(caught.value)


def template_problem(spec, function=ship) -> str:
    with pytest.raises(KeyTemplateError) as caught:
        compiled(spec, function)
    assert caught.value.task == "shop.ship"
    assert "shop.ship" in str(caught.value)
    return str(caught.value)


class TestArguments:
    """Placeholders and the arguments that give their values."""

    def test_the_designs_example(self):
        """The template `order:<order_id>` makes `order:42` of 42, in a guard and in
        `taskguard.key()`."""
        assert compiled("order:<order_id>")((42,), {}) == ("order:42",)
        assert key("order:<order_id>", order_id=42) == "order:42"

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [((42,), {}), ([42], {}), ((), {"order_id": 42}), ((42, "eu"), {"priority": 1})],
    )
    def test_passed_by_position_or_by_name(self, args, kwargs):
        """However an argument is passed, and with defaults applied, the key is the same."""
        template = "<region>/<order_id>/<priority>"
        assert compiled(template)(args, kwargs) == ("eu/42/1",)

    def test_calls_leave_nothing_behind(self):
        """The arguments of a call do not become defaults of the next call."""
        keys = compiled("<order_id>:<region>")
        assert keys((1, "us"), {}) == ("1:us",)
        assert keys((1,), {}) == ("1:eu",)

    def test_the_guard_is_no_argument(self):
        """`guard` is neither a parameter of templates nor an argument of calls."""
        assert "Parameters: order_id, region, priority." in template_problem("<guard>")
        with pytest.raises(TypeError, match="guard"):
            compiled("<order_id>")((42,), {"guard": None})

    def test_a_guard_in_the_middle(self):
        """A guard between two parameters moves neither of them."""

        def task(a, guard, b): ...

        assert compiled("<a>:<b>", task)((1, 2), {}) == ("1:2",)

    def test_other_names_can_be_ignored(self):
        """With `ignore=()`, `guard` is a parameter like any other."""
        assert compiled("<guard>", ignore=())((1,), {"guard": 2}) == ("2",)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((), {}),
            ((), {"region": "eu"}),
            ((1, 2, 3), {}),
            ((1,), {"order_id": 1}),
            ((1,), {"other": 1}),
        ],
    )
    def test_arguments_that_do_not_fit(self, args, kwargs):
        """Wrong arguments raise the TypeError of the call itself, with the task's name."""
        with pytest.raises(TypeError):
            ship(*args, **kwargs)
        with pytest.raises(TypeError, match=r"^shop\.ship: "):
            compiled("<order_id>")(args, kwargs)

    def test_positional_only_parameters(self):
        """A positional-only parameter is not taken by name."""

        def task(order_id, /, region="eu"): ...

        assert compiled("<order_id>:<region>", task)((1,), {"region": "us"}) == ("1:us",)
        with pytest.raises(TypeError):
            compiled("<order_id>", task)((), {"order_id": 1})

    def test_required_keyword_only_parameters(self):
        """A keyword-only parameter without a default must be given."""

        def task(*, order_id): ...

        assert compiled("<order_id>", task)((), {"order_id": 1}) == ("1",)
        with pytest.raises(TypeError):
            compiled("<order_id>", task)((), {})

    def test_collected_positional_arguments(self):
        """`<args[1]>` reads an item of `*args`. A missing item is an error."""

        def task(*args): ...

        keys = compiled("<args[1]>", task)
        assert keys((1, 2), {}) == ("2",)
        with pytest.raises(
            KeyArgumentError, match=r"<args\[1\]> cannot be read: tuple has no item"
        ):
            keys((1,), {})

    def test_collected_keyword_arguments(self):
        """A name that is no parameter is read from `**options` at each call."""

        def task(order_id, **options): ...

        keys = compiled("<order_id>:<tenant>", task)
        assert keys((1,), {"tenant": "acme"}) == ("1:acme",)
        assert compiled("<options[tenant]>", task)((1,), {"tenant": "acme"}) == ("acme",)
        with pytest.raises(KeyArgumentError, match="<tenant> is not among the arguments") as caught:
            keys((1,), {"tenent": "acme"})
        assert caught.value.placeholder == "<tenant>"
        assert caught.value.task == "shop.ship"

    def test_a_parameter_comes_before_a_collected_name(self):
        """If `**options` has the name of a positional-only parameter, the placeholder means the
        parameter."""

        def task(order_id, /, **options): ...

        assert compiled("<order_id>", task)((1,), {"order_id": 2}) == ("1",)
        assert compiled("<options[order_id]>", task)((1,), {"order_id": 2}) == ("2",)

    @pytest.mark.parametrize("template", ["<args>", "<options>", "<args.x>"])
    def test_all_of_the_collected_arguments(self, template):
        """`*args` and `**options` as a whole are refused at decoration."""

        def task(*args, **options): ...

        assert "name one, as in <" in template_problem(template, task)
        assert "Parameters: *args, **options." in template_problem(template, task)


class TestPaths:
    """Attributes and items."""

    def test_attributes(self):
        """A placeholder reads attributes, such as `<order.id>` and longer paths."""
        order = SimpleNamespace(id=42, customer=SimpleNamespace(id="c1"))
        assert one("<x.id>:<x.customer.id>", order) == "42:c1"

    def test_items_of_a_dict(self):
        """`<payload[sku]>` reads an item. Digits also find a number, because JSON makes text of
        it."""
        assert one("<x[sku]>", {"sku": "s-1"}) == "s-1"
        assert one("<x[7]>", {7: "a"}) == one("<x[7]>", {"7": "a"}) == "a"
        assert one("<x[7]>", {7: "number", "7": "text"}) == "text"

    def test_items_of_a_list(self):
        """Lists and tuples are read by index, also from the end."""
        assert one("<x[0]>:<x[-1]>", ["a", "b", "c"]) == "a:c"
        assert one("<x[0]>:<x[-1]>", ("a", "b", "c")) == "a:c"

    def test_steps_combine(self):
        """One placeholder can have attributes, items, a format and a filter."""
        order = SimpleNamespace(lines=[{"due": date(2024, 5, 1)}])
        assert one("<x.lines[0][due]:%Y>", order) == "2024"
        assert len(one("<x.lines[0][due]:%Y|hash>", order)) == 32

    def test_a_default_dict_is_left_alone(self):
        """Reading an item does not add it to a defaultdict."""
        payload: defaultdict[str, str] = defaultdict(lambda: "made up")
        with pytest.raises(KeyArgumentError, match="no item 'sku'"):
            one("<x[sku]>", payload)
        assert payload == {}

    @pytest.mark.parametrize(
        ("template", "value", "said"),
        [
            ("<x.id>", None, "NoneType has no attribute 'id'"),
            ("<x.id>", {"id": 1}, "dict has no attribute 'id'"),
            ("<x[sku]>", {}, "dict has no item 'sku'"),
            ("<x[3]>", [1], "list has no item '3'"),
            ("<x[sku]>", [1], "list has no item 'sku'"),
            ("<x[0]>", "text", "str has no item '0'"),
            ("<x[0]>", 42, "int has no item '0'"),
            ("<x[0]>", b"ab", "bytes has no item '0'"),
            ("<x[0]>", bytearray(b"ab"), "bytearray has no item '0'"),
            ("<x[0]>", memoryview(b"abcd").cast("B", [2, 2]), "memoryview has no item '0'"),
        ],
    )
    def test_what_is_not_there(self, template, value, said):
        """The error of a missing step names the placeholder, the type and the step."""
        with pytest.raises(KeyArgumentError) as caught:
            one(template, value)
        assert str(caught.value) == f"{template} cannot be read: {said}"

    def test_what_a_property_raises(self):
        """A property's AttributeError is the cause of the key's error. Its other errors go on
        unchanged."""

        class Order:
            @property
            def broken(self):
                return self.no_such

            @property
            def away(self):
                raise ConnectionError("database")

        with pytest.raises(KeyArgumentError) as caught:
            one("<x.broken>", Order())
        assert "no_such" in str(caught.value.__cause__)
        with pytest.raises(ConnectionError):
            one("<x.away>", Order())


class Colour(Enum):
    RED = "red"


class TextColour(str, Enum):  # noqa: UP042  # as users write it
    RED = "red"

    def __str__(self):
        return "never this"


class Level(IntEnum):
    HIGH = 3


class Nested(Enum):
    COLOUR = Colour.RED
    PAIR = (1, 2)


class LoudInt(int):
    def __str__(self):
        return "loud"

    __repr__ = __str__

    def __format__(self, spec):
        return "loud"


class LoudText(str):
    __slots__ = ()

    def __str__(self):
        return "loud"


class LoudFloat(float):
    def __repr__(self):
        return "loud"


class Phone:
    def __init__(self, number):
        self.number = number

    def __str__(self):
        return self.number


class TestValues:
    """The text that a value gets in a key."""

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (42, "42"),
            ("42", "42"),
            (-7, "-7"),
            (True, "True"),
            (1.0, "1.0"),
            (1e16, "1e+16"),
            (Decimal("1.50"), "1.50"),
            (Decimal("1E+2"), "1E+2"),
            (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
            (date(2024, 5, 1), "2024-05-01"),
            (NOON, "2024-05-01T12%3A30%3A00"),
            (datetime(2024, 5, 1, 12, tzinfo=UTC), "2024-05-01T12%3A00%3A00+00%3A00"),
            (time(12, 30), "12%3A30%3A00"),
            (Colour.RED, "red"),
            (TextColour.RED, "red"),
            (Level.HIGH, "3"),
            (Nested.COLOUR, "red"),
        ],
    )
    def test_texts(self, value, text):
        """Each type has the text of the table in `values.py`."""
        assert one("<x>", value) == text
        assert encode_value(value) == text

    @pytest.mark.parametrize(
        ("value", "text"), [(LoudInt(1), "1"), (LoudText("a"), "a"), (LoudFloat(1), "1.0")]
    )
    def test_subclasses_say_what_json_sends(self, value, text):
        """A subclass gets the text of its base type, because its own `__str__` is lost on the way
        to a worker."""
        assert one("<x>", value) == text
        assert type(one("<x>", value).split(":")[0]) is str

    def test_integers_of_other_libraries(self):
        """A value that is registered as Integral gets its digits."""

        class Int64:
            def __int__(self):
                return 7

        Integral.register(Int64)
        assert one("<x>", Int64()) == "7"

    def test_values_that_equal_but_read_differently(self):
        """Equal values with different texts make different keys."""
        for first, second in [
            (1, 1.0),
            (Decimal("1.0"), Decimal("1.00")),
            (True, "true"),
            (0.0, -0.0),
        ]:
            assert one("<x>", first) != one("<x>", second)

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (None, "is None"),
            ("", "is empty text"),
            (LoudText(""), "is empty text"),
            (float("nan"), "is not a finite number"),
            (float("-inf"), "is not a finite number"),
            (Decimal("NaN"), "is not a finite number"),
            (Decimal("sNaN"), "is not a finite number"),
            (Decimal("Infinity"), "is not a finite number"),
            ([1], "is a list, not a single value"),
            ((1,), "is a tuple, not a single value"),
            ({1}, "is a set, not a single value"),
            (frozenset({1}), "is a frozenset, not a single value"),
            ({"a": 1}, "is a dict, not a single value"),
            (range(3), "is a range, not a single value"),
            (Nested.PAIR, "is a tuple, not a single value"),
            (b"42", "is bytes: decode it"),
            (bytearray(b"42"), "is bytearray: decode it"),
            (memoryview(b"42"), "is memoryview: decode it"),
            ("\ud800", "holds a lone surrogate"),
            (10**700, "is a number of more than 2,048 bits"),
            (object(), "is an object of class object: name an attribute, as in <order.id>"),
            (Phone("1"), "is an object of class Phone"),
            (timedelta(1), "is an object of class timedelta"),
            (1j, "is an object of class complex"),
            (len, "is an object of class builtin_function_or_method"),
        ],
    )
    def test_refused_by_name(self, value, said):
        """An invalid value is refused with its placeholder, its type, and what to do."""
        assert refusal("k:<x>", value).startswith(f"<x> {said}")
        if not isinstance(value, list | tuple | dict):
            assert refusal("k:<x|hash>", value).startswith(f"<x|hash> {said}")

    def test_a_list_has_a_digest(self):
        """With `|hash`, lists and dicts have a digest. Values that are equal as JSON share one, and
        others do not."""
        groups = [
            ([1, "a"], ["1", "a"], (1, "a")),
            ([], ()),
            ({"a": 1, "b": [2]}, {"b": (2,), "a": 1}),
            ({"1": "x"}, {1: "x"}),
            (["a", 1],),
            ([[1, "a"]],),
            ([[1], ["a"]],),
            ([1, "a", None],),
            ([1, "a", ""],),
            (["1,a"],),
            ("1,a",),
            ("[1,a,],",),
            ([""],),
            ([None],),
            (["!"],),
            ([[]],),
            ({},),
            ({"a": [1, {"b": 2}]},),
            ({"a": 1},),
            ({"a": [1]},),
            ({"": ""},),
        ]
        digests = [{one("<x|hash>", value) for value in group} for group in groups]
        assert [len(each) for each in digests] == [1] * len(groups)
        assert len(set.union(*digests)) == len(groups)
        assert all(len(key) == 32 for key in set.union(*digests))

    def test_a_list_whose_digest_would_say_nothing_sure_is_refused(self):
        """The items of a list have to be valid values themselves. Depth and size are limited."""
        cyclic: list = []
        cyclic.append(cyclic)
        for value, said in (
            ([object()], "is an object of class object"),
            ([float("nan")], "is not a finite number"),
            ([b"1"], "is bytes"),
            ([{1, 2}], "is a set"),
            ({1.5: 1}, "has a key of class float"),
            ({None: 1}, "has a key of class NoneType"),
            ({True: 1}, "has a key of class bool"),
            (cyclic, "is nested more than 20 deep"),
            ([1] * (MAX_TEXT_CHARS + 1), "holds more than 65,536 values"),
            ([[1] * 1000] * 100, "holds more than 65,536 values"),
            ([SECRET + "\ud800"], "holds a lone surrogate"),
        ):
            assert said in refusal("k:<x|hash>", value)
            assert SECRET not in refusal("k:<x|hash>", value)

    @pytest.mark.parametrize(
        "value", [None, "", [1], b"1", float("nan"), object(), SimpleNamespace()]
    )
    def test_refused_with_str_too(self, value):
        """`|str` refuses None, empty text, lists, bytes, NaN, and objects without a text of their
        own."""
        assert "<x|str> " in refusal("<x|str>", value)

    def test_str_of_any_object(self):
        """`|str` takes an object's `str()` as its text."""
        assert one("<x|str>", Phone("+49 30")) == "+49%2030"
        assert one("<x|str>", 42) == "42"
        assert (
            one("<x|str|hash>", Phone("1"))
            == one("<x|hash|str>", Phone("1"))
            == one("<x|hash>", "1")
        )

    def test_a_class_without_a_str_of_its_own(self):
        """`|str` refuses the default text, because it has an address that differs in each
        process."""
        said = refusal("<x|str>", SimpleNamespace(a=1))
        assert "SimpleNamespace, which has no __str__ of its own" in said
        assert " at 0x" not in said

    def test_a_str_that_returns_no_text(self):
        """If `__str__` does not return text, the error names the class."""

        nameless = type("Nameless", (), {"__str__": lambda self: None})()
        assert "class Nameless, whose __str__ returns NoneType" in refusal("<x|str>", nameless)

    def test_decimals_under_another_context(self):
        """A process's decimal context does not change a key."""
        with decimal.localcontext() as context:
            context.prec, context.capitals, context.rounding = 2, 0, decimal.ROUND_UP
            assert one("<x>", Decimal("1E+2")) == "1E+2"
            assert one("<x>", Decimal("123.41")) == "123.41"
            assert decimal.getcontext().prec == 2

    def test_a_proxy_is_not_believed(self):
        """A value is treated by its real type, even if its `__class__` says another one."""

        class Proxy:
            @property
            def __class__(self):
                raise RuntimeError("outside of a request")

        assert "object of class Proxy" in refusal("<x>", Proxy())

    def test_encode_value_names_the_given_argument(self):
        """`encode_value()` names the given task and placeholder in its error."""
        with pytest.raises(KeyArgumentError) as caught:
            encode_value(None, task="shop.ship", placeholder="message id")
        assert str(caught.value).startswith("task shop.ship: message id is None")
        assert (caught.value.task, caught.value.placeholder) == ("shop.ship", "message id")
        assert isinstance(caught.value, ValueError)


class TestEncoding:
    """How a text is encoded in a key."""

    def test_plain_characters_stay(self):
        """ASCII letters, digits and `-_.~@+` are not encoded."""
        plain = "ABCxyz0189-_.~@+"
        assert one("<x>", plain) == plain

    @pytest.mark.parametrize(
        ("text", "encoded"),
        [
            ("a b", "a%20b"),
            ("a:b/c", "a%3Ab%2Fc"),
            ("100%", "100%25"),
            ("%20", "%2520"),
            ("{1}", "%7B1%7D"),
            ("a\x00\n*", "a%00%0A%2A"),
            ("é", "%C3%A9"),
            ("٣", "%D9%A3"),
            ("😀", "%F0%9F%98%80"),
        ],
    )
    def test_all_others_are_percent_encoded(self, text, encoded):
        """Other characters are percent-encoded from UTF-8, in upper-case hex. So are digits of
        other scripts."""
        assert one("<x>", text) == encoded

    def test_look_alikes_stay_different(self):
        """Texts are not normalized, folded or trimmed, so that look-alikes make different keys
        (fault 34)."""
        texts = ["a", "A", "á", "a\u0301", "a ", " a", "а", "ａ", "a\x00"]
        assert len({one("<x>", text) for text in texts}) == len(texts)

    def test_short_of_the_limit(self):
        """A key of up to 200 bytes is not shortened. Literal text counts in bytes."""
        assert one("k:<x>", "a" * 198) == "k:" + "a" * 198
        assert "%~" not in one("ü:<x>", "a" * 197)
        assert "%~" in one("ü:<x>", "a" * 198)

    def test_over_the_limit(self):
        """A longer key keeps its beginning, and ends with a digest of the whole key."""
        first, second = one("k:<x>", "a" * 199), one("k:<x>", "a" * 198 + "b")
        assert first != second
        assert (
            first == "k:" + "a" * 164 + "%~" + hashlib.sha256(b"k:" + b"a" * 199).hexdigest()[:32]
        )
        assert len(first) == MAX_KEY_BYTES

    @pytest.mark.parametrize("width", range(1, 8))
    def test_the_cut_splits_no_character(self, width):
        """Shortening cuts neither an escape nor a character of the literal text."""
        for template in ["a" * width + ":<x>", "ü" * 80 + "a" * width + ":<x>"]:
            shortened = one(template, "é" * 200)
            head, _, _digest = shortened.partition("%~")
            assert head.count("%") == len([p for p in head.split("%")[1:] if len(p) >= 2])
            assert MAX_KEY_BYTES - 6 < len(shortened.encode()) <= MAX_KEY_BYTES

    def test_no_short_key_looks_shortened(self):
        """Only a shortened key has `%~`: an argument that imitates one makes another key."""
        shortened = one("k:<x>", "a" * 300)
        assert one("k:<x>", shortened.removeprefix("k:")) != shortened
        assert shorten(shortened) == shortened

    def test_a_text_at_the_limit(self):
        """A text of 65,536 characters makes a key. A longer one is refused, hashed or not."""
        assert len(one("<x>", "é" * MAX_TEXT_CHARS)) <= MAX_KEY_BYTES
        assert len(one("<x|hash>", "é" * MAX_TEXT_CHARS)) == 32
        assert "65,537 characters" in refusal("<x>", "é" * (MAX_TEXT_CHARS + 1))
        assert "65,537 characters" in refusal("<x|hash>", "é" * (MAX_TEXT_CHARS + 1))

    @pytest.mark.parametrize("separators", ["é:", "a/", "::"])
    def test_many_separators(self, separators):
        """The text of a callable takes less than 50 ms, whatever it contains."""
        text = separators * (MAX_TEXT_CHARS // 2)
        keys = compiled(lambda **_: text)
        took_s = []
        for _ in range(3):
            started_s = clock.thread_time()
            assert len(keys((1,), {})[0]) <= MAX_KEY_BYTES
            took_s.append(clock.thread_time() - started_s)
        assert min(took_s) < 0.05

    @pytest.mark.parametrize(
        "value",
        [
            "x" * 10_000_000,
            LoudText("\ud800" * 10_000_000),
            b"x" * 10_000_000,
            1 << 80_000_000,
            [0] * 1_000_000,
            Decimal((0, (1,) * 1_000_000, 0)),
        ],
        ids=["text", "surrogates", "bytes", "int", "list", "Decimal"],
    )
    @pytest.mark.parametrize("template", ["k:<x>", "k:<x|hash>", "k:<x|str>", "k:<x:%Y>"])
    def test_huge_values_are_refused_uncopied(self, template, value):
        """A huge value is refused before it is copied or printed."""
        with pytest.raises(KeyArgumentError):
            one(template, value)  # once before, so that no import is counted
        tracemalloc.start()
        try:
            with pytest.raises(KeyArgumentError):
                one(template, value)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 100_000


class TestFormats:
    """Dates and times with a format, as in `<when:%Y-%m-%d>`."""

    @pytest.mark.parametrize(
        ("template", "value", "text"),
        [
            ("<x:%Y-%m-%d>", NOON, "2024-05-01"),
            ("<x:%Y-%m-%d>", date(2024, 5, 1), "2024-05-01"),
            ("<x:%H:%M>", NOON, "12%3A30"),
            ("<x:%H.%M>", time(12, 30), "12.30"),
            ("<x:%G-W%V>", date(2024, 12, 30), "2025-W01"),
            ("<x:%Y%%>", date(2024, 5, 1), "2024%25"),
            ("<x:%%Y%m>", date(2024, 5, 1), "%25Y05"),
            ("<x:%Y年%m>", date(2024, 5, 1), "2024%E5%B9%B405"),
            ("<x:%Y%m>", date(42, 5, 1), "004205"),
            ("<x:%F>", date(42, 5, 1), "0042-05-01"),
            ("<x:%G-%V>", date(42, 5, 1), "0042-18"),
        ],
    )
    def test_formats(self, template, value, text):
        """A format has the directives of dates and times, and literal text between them."""
        assert one(template, value) == text

    @pytest.mark.parametrize(
        ("template", "value", "said"),
        [
            ("<x:%Y>", "2024-05-01", "is text, while its format %Y is one of a date or datetime"),
            ("<x:%Y>", 2024, "is of class int, while its format %Y is one of a date or datetime"),
            ("<x:%Y>", None, "is None"),
            ("<x:%Y>", float("nan"), "is not a finite number"),
            ("<x:%z>", NOON, "is empty text"),
        ],
    )
    def test_values_that_do_not_fit(self, template, value, said):
        """A value that is no date is refused with its type and its format."""
        assert refusal(template, value).startswith(f"{template} {said}")

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("<order_id:>", "empty format: leave the colon out"),
            ("<order_id:%b>", "the directive %b, whose text depends on locale"),
            ("<order_id:%Y %Z>", "the directive %Z, whose text depends on locale"),
            ("<order_id:%Y%>", "the directive %, whose text"),
            ("<order_id:%Y\x00%m>", "the template has the character '\\x00' (U+0000)"),
            ("<order_id:%Y\ud800>", "the template has the character '\\ud800' (U+D800)"),
            ("<order_id:%Y\n>", "the template has the character '\\n' (U+000A)"),
            ("<order_id:%-d>", "the format '%-d', which is not one of a date"),
            ("<order_id:abc>", "the format 'abc', which is not one of a date"),
            ("<order_id:>10>", "<order_id:> has an empty format"),
            ("<order_id:05d>", "the format '05d', which is not one of a date"),
            ("<order_id:.2f>", "the format '.2f', which is not one of a date"),
            ("<order_id:n>", "the format 'n', which is not one of a date"),
            ("<order_id:%Y|str>", "|str makes text, which takes no format"),
        ],
    )
    def test_formats_that_cannot_be(self, template, said):
        """An invalid format, or one that depends on the machine, is refused at decoration."""
        assert said in template_problem(template)


class TestHash:
    """The filter `|hash` keeps a value out of keys and errors."""

    def test_the_digest(self):
        """The digest is the first 128 bits of SHA-256 of the text, which every language can
        compute."""
        digest = hashlib.sha256(SECRET.encode()).hexdigest()[:32]
        assert one("user:<x|hash>", SECRET) == f"user:{digest}"

    def test_of_a_formatted_value(self):
        """With a format, the digest is that of the formatted text."""
        assert one("<x:%Y|hash>", date(2024, 5, 1)) == one("<x|hash>", "2024")

    @pytest.mark.parametrize(
        ("template", "value"),
        [
            ("<x|hash>", SECRET + "\ud800"),
            ("<x|hash>", [SECRET + "\ud800"]),
            ("<x|hash>", SECRET.encode()),
            ("<x|hash>", SECRET * MAX_TEXT_CHARS),
            ("<x:%Y|hash>", SECRET),
            ("<x[mail]|hash>", {SECRET: 1}),
            ("<x[0]|hash>", SECRET),
            ("<x.a.b|hash>", SimpleNamespace(a=SECRET)),
        ],
    )
    def test_in_no_error(self, template, value):
        """A hashed value is in no error message, no chained error, and no pickle."""
        with pytest.raises(KeyArgumentError) as caught:
            one(template, value)
        error = caught.value
        assert error.__cause__ is None
        assert error.__context__ is None
        assert SECRET not in str(error) + repr(error) + repr(vars(error))
        assert SECRET.encode() not in pickle.dumps(error)

    def test_in_no_chained_error(self):
        """The error of a property of a hidden value is not chained."""

        class User:
            @property
            def email(self):
                raise AttributeError(SECRET)

        with pytest.raises(KeyArgumentError) as caught:
            one("<x.email|hash>", User())
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None

    def test_in_no_repr(self):
        """The repr shows the templates and the task, and no value of a call."""
        keys = compiled(["user:<order_id|hash>", "all"])
        keys((SECRET,), {})
        assert repr(keys) == "<KeyFunction user:<order_id|hash> all of shop.ship>"


class TestTemplateChecks:
    """Templates that are refused at decoration, by name."""

    def test_an_unknown_parameter(self):
        """The error names the task, the placeholder, the nearest name, and all names."""
        with pytest.raises(KeyTemplateError) as caught:
            compiled("order:<ordr_id>")
        assert str(caught.value) == (
            "task shop.ship, key 'order:<ordr_id>': <ordr_id> is not one of the arguments"
            " (did you mean <order_id>?). Parameters: order_id, region, priority."
        )
        assert caught.value.task == "shop.ship"
        assert caught.value.template == "order:<ordr_id>"
        assert isinstance(caught.value, ConfigurationError)

    def test_a_task_without_parameters(self):
        """The error of a task without parameters says that there are none."""
        assert "Parameters: none." in template_problem("<order_id>", lambda: None)

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("", "the template is empty"),
            ("order:<order_id", "the '<' of '<order_id' is not closed"),
            ("a<b<order_id>", "the '<' of '<b<order_id>' is not closed"),
            ("order:<>", "<> cannot be read"),
            ("<order id>", "<order id> cannot be read"),
            ("<1>", "<1> cannot be read"),
            ("<order_id.>", "<order_id.> cannot be read"),
            ("<order_id[]>", "<order_id[]> cannot be read"),
            ("<order_id[a>", "<order_id[a> cannot be read"),
            ("<order_id|unknown>", "no filter |unknown; there are |hash (a digest"),
            ("<order_id|>", "no filter |; there are |hash"),
            ("<order_id|hash|hash>", "|hash is there twice"),
            ("my order:<order_id>", "has the character ' ' (U+0020)"),
            ("order\n", r"has the character '\n' (U+000A)"),
            ("order\u200b:", "(U+200B)"),
            ("{order}:<order_id>", "has the character '{'"),
            ("order}:<order_id>", "has the character '}'"),
            ("100%:<order_id>", "has the character '%'"),
            ("\ud800", "(U+D800)"),
            ("<order_id[a\n]>", "(U+000A)"),
        ],
    )
    def test_refused(self, template, said):
        """The error names the wrong part of the template, and the parameters."""
        problem = template_problem(template)
        assert said in problem
        assert "Parameters: order_id, region, priority." in problem

    @pytest.mark.parametrize("between", ["", "_", "-", ".", "~", "@", "+", "and", "_7_"])
    def test_placeholders_that_values_could_bridge(self, between):
        """Placeholders need a separator that no value contains (fault 33): with `<x>_<y>`, ('a_b',
        'c') and ('a', 'b_c') would be one key."""
        problem = template_problem(f"<order_id>{between}<region>")
        assert f"between <order_id> and <region> there is {between!r}" in problem
        assert "put ':' or '/' between them" in problem

    @pytest.mark.parametrize("between", [":", "/", "_:_", "#", ",", "<<", ">", "ü"])
    def test_placeholders_that_are_kept_apart(self, between):
        """A character that values cannot contain separates two placeholders."""
        keys = compiled(f"<order_id>{between}<region>")
        assert keys(("a_b", "c"), {}) != keys(("a", "b_c"), {})
        assert keys((f"a{between}b", "c"), {}) != keys(("a", f"b{between}c"), {})

    @pytest.mark.parametrize("template", ["<order_id>:", "<<", "a", "<order_id"])
    def test_a_template_at_the_limit(self, template):
        """A template may have 1,000 characters. A longer one is refused unread."""
        assert compiled("<order_id>:" + "a" * 989)((1,), {})
        problem = template_problem(template * 1_000_000)
        assert f"has {len(template)},000,000 characters, at most 1,000" in problem
        assert len(problem) < 10_000

    def test_a_constant(self):
        """A template without a placeholder is one key for all calls."""
        assert compiled("nightly-report")((1,), {}) == ("nightly-report",)

    def test_a_literal_bracket(self):
        """`<<` makes a `<`, also before a placeholder. `>` is an ordinary character."""
        assert compiled("a<<b->:<<<order_id>>")((1,), {}) == ("a<b->:<1>",)

    @pytest.mark.parametrize("spec", [None, 42, b"order", {"a"}, {"order": 1}])
    def test_no_template_at_all(self, spec):
        """A key is text, a callable, or a list of these. Other types are refused."""
        assert f"not {type(spec).__name__}" in template_problem(spec)


class TestSeveralKeys:
    """A list of keys: all or none, in one order for all callers."""

    def test_sorted_and_once(self):
        """Keys are sorted by code point, whatever the order of the templates. Repeated keys count
        once."""
        keys = compiled(["b:<order_id>", "a:<region>", "a:<order_id>"])
        assert keys((1, "x"), {}) == ("a:1", "a:x", "b:1")
        assert keys(("x", "x"), {}) == ("a:x", "b:x")
        assert compiled(("B", "a", "É", "_"))((1,), {}) == ("B", "_", "a", "É")

    def test_all_or_none(self):
        """If one argument cannot be a key, the whole list is refused."""
        with pytest.raises(KeyArgumentError, match="<region> is None"):
            compiled(["a:<order_id>", "b:<region>"])((1, None), {})

    def test_wrong_lists(self):
        """An empty list, a list of too many keys, and other items than templates are refused."""
        assert "the list has 0 keys" in template_problem([])
        assert f"the list has {MAX_KEYS + 1} keys" in template_problem(["k"] * (MAX_KEYS + 1))
        assert "holds templates and callables, not int" in template_problem(["k", 42])
        assert "not list" in template_problem([["k"]])
        assert "<nope> is not one of the arguments" in template_problem(["k", "<nope>"])

    def test_lists_that_cannot_be_printed(self):
        """Cyclic, deep and very long lists are refused with a short error."""
        cyclic: list[object] = []
        cyclic.append(cyclic)
        deep: list[object] = []
        for _ in range(100_000):
            deep = [deep]
        assert "not list" in template_problem(cyclic)
        assert "not list" in template_problem(deep)
        assert "not int" in template_problem([10**5000])
        with pytest.raises(KeyTemplateError, match="a template is text, not list"):
            key(deep, x=1)
        problem = template_problem(["<order_id>"] * 1_000_000)
        assert "the list has 1000000 keys" in problem
        assert len(problem) < 10_000


class TestCallables:
    """Keys that a callable makes."""

    def test_called_by_name_with_defaults(self):
        """A callable gets all arguments by name, with their defaults."""
        keys = compiled(lambda order_id, region, **_: f"order:{region}/{order_id}")
        assert keys((1,), {}) == keys((), {"order_id": 1}) == ("order:eu/1",)

    def test_arguments_that_have_no_other_way(self):
        """A callable gets positional-only and collected arguments as the task does."""
        seen = []

        def task(a, /, b=2, *rest, c, **options): ...

        def spec(*args, **kwargs):
            seen.append((args, kwargs))
            return "k"

        compiled(spec, task)((1,), {"c": 3, "d": 4})
        compiled(spec, task)((1, 5, 6), {"c": 3})
        assert seen == [((1, 2), {"c": 3, "d": 4}), ((1, 5, 6), {"c": 3})]

    def test_a_callable_that_does_not_fit(self):
        """A callable that does not take the task's arguments is refused at decoration, with a
        correct signature."""
        problem = template_problem(lambda order: f"order:{order}")
        assert "<lambda> does not take the task's arguments" in problem
        assert "lambda order_id, **_" in problem
        assert "Parameters: order_id, region, priority." in problem

    def test_several_keys(self):
        """A callable may return any iterable of texts. They are sorted together with the other keys
        of the list."""
        for make in (list, tuple, set, iter):
            keys = compiled([lambda order_id, make=make, **_: make(["b", "a", "b"]), "c", "a"])
            assert keys((1,), {}) == ("a", "b", "c")

    def test_text_is_made_safe(self):
        """Characters that values may not contain are percent-encoded, except `:` and `/`."""
        assert compiled(lambda **_: "a:b/c d{é}\n%20")((1,), {}) == (
            "a:b/c%20d%7B%C3%A9%7D%0A%2520",
        )
        assert len(compiled(lambda **_: "k:" + "a" * 300)((1,), {})[0]) == MAX_KEY_BYTES

    def test_finished_keys_stay(self):
        """A key that `taskguard.key()` made is not encoded again."""
        keys = compiled(lambda order_id, **_: [key("order:<o>", o=o) for o in order_id])
        ids = ["a b", "x" * 300]
        assert set(keys((ids,), {})) == {key("order:<order_id>", order_id=o) for o in ids}
        assert {type(k) for k in keys((ids,), {})} == {str}

    @pytest.mark.parametrize(
        ("result", "said"),
        [
            (None, "returned NoneType"),
            (42, "returned int"),
            (b"k", "returned bytes"),
            (memoryview(b"abcd").cast("B", [2, 2]), "returned memoryview"),
            ({"k": 1}, "returned dict"),
            ([], "returned no key"),
            ("", "returned empty text"),
            (["k", None], "returned a list with NoneType"),
            (["k", ""], "returned empty text"),
            ("\ud800", "holds a lone surrogate"),
            ("x" * (MAX_TEXT_CHARS + 1), "is text of 65,537 characters"),
            ([str(n) for n in range(MAX_KEYS + 1)], "makes more than 100 keys"),
        ],
    )
    def test_results_that_are_no_keys(self, result, said):
        """An invalid result is refused with the name of the callable."""

        def by_code(**_):
            return result

        with pytest.raises(KeyArgumentError) as caught:
            compiled(by_code)((1,), {})
        assert f"task shop.ship: the key callable {by_code.__qualname__} {said}" in str(
            caught.value
        )

    @pytest.mark.parametrize("make", [str, lambda n: key("<n>", n=n)])
    def test_an_endless_result_of_repeats(self, make):
        """An endless generator of repeated texts is stopped after 1,000 texts."""
        repeated = itertools.cycle([make(1), make(2)])
        with pytest.raises(KeyArgumentError, match="more than 1,000 texts"):
            compiled(lambda **_: repeated)((1,), {})
        assert compiled(lambda **_: [make(1), make(2)] * 500)((1,), {}) == ("1", "2")

    def test_an_endless_result(self):
        """An endless generator is stopped after 100 keys."""
        with pytest.raises(KeyArgumentError, match="makes more than 100 keys"):
            compiled(lambda **_: (str(n) for n in iter(int, 1) for n in range(1000)))((1,), {})

    def test_too_many_together(self):
        """The limit counts the keys of all parts of a list."""
        parts = [lambda half=half, **_: [f"{half}{n}" for n in range(60)] for half in "ab"]
        with pytest.raises(KeyArgumentError, match="makes more than 100 keys"):
            compiled(parts)((1,), {})

    def test_its_own_exceptions(self):
        """An exception of the callable goes on unchanged."""
        with pytest.raises(ZeroDivisionError):
            compiled(lambda order_id, **_: str(1 // order_id))((0,), {})

    def test_without_a_signature(self):
        """A callable without a readable signature is called, and its result is checked."""
        with pytest.raises(ValueError, match="no signature"):
            inspect.signature(dict)
        keys = compiled(dict)
        with pytest.raises(KeyArgumentError, match="the key callable dict returned dict"):
            keys((1,), {})


class TestKey:
    """The function `taskguard.key()`."""

    def test_names_are_checked(self):
        """If a placeholder has no value, the error names the given values."""
        with pytest.raises(KeyTemplateError) as caught:
            key("order:<order_id>", order=1, region="eu")
        assert str(caught.value) == (
            "key 'order:<order_id>': <order_id> is not one of the arguments"
            " (did you mean <order>?). Values given: order, region."
        )
        assert caught.value.task is None

    def test_any_name_and_any_further_value(self):
        """A value may be called `template`. Values that the template does not name are ignored."""
        assert key("<template>", template=1, other=None) == "1"

    def test_a_template_of_a_class_of_its_own(self):
        """A subclass of str is read as its text, even if it is not hashable."""

        class Unhashable(str):
            __slots__ = ()
            __hash__ = None

        assert key(Unhashable("k:<x>"), x=1) == "k:1"

    @pytest.mark.parametrize("template", ["", "<a", None, ["<a>"]])
    def test_bad_templates(self, template):
        """Invalid templates are refused as at decoration."""
        with pytest.raises(KeyTemplateError):
            key(template, a=1)

    def test_without_a_task(self):
        """Without a task, the error of a value begins with the placeholder."""
        assert refusal("k:<x>", None).startswith("<x> is None")
