"""The properties of keys for every input, for Hypothesis and for atheris.

Guarantees, for every input that `check_input` makes of its choices:

* Decoration raises nothing but `KeyTemplateError`, a call nothing but `KeyArgumentError`, or the
  `TypeError` that the call itself would be. Exceptions of an argument's own code go on unchanged.
* A key has 1 to 200 bytes of UTF-8, no blank, control character or brace, and every `%` in it is an
  escape or the mark of a shortened key.
* A key is its template with the placeholders' texts percent-encoded, as long as that is short
  enough.
* Within a run, one template never makes one key of two different texts, nor two keys of one text.
* `taskguard.key`, a template, a list and a callable make the same keys, whatever `decimal` context
  is set where they are made.
* Neither decoration nor call takes 50 ms of processor time. A slow one is tried once more, because
  a garbage collection or a first import may have slowed it.

Does not guarantee: that a refused input is wrong; see `inputs.py`.
"""

from __future__ import annotations

import decimal
import hashlib
import inspect
import re
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fuzz.inputs import (
    Call,
    Choices,
    OwnError,
    any_calls,
    any_result,
    any_spec,
    any_template,
    any_value,
    pick,
    planned,
)

from taskguard.errors import KeyArgumentError, KeyTemplateError
from taskguard.keys import MAX_KEY_BYTES, MAX_TEXT_CHARS, KeyFunction, compile_key, key

__all__ = ["FindingError", "Record", "check", "check_input"]

# A text of the most that there may be takes 5; a call here has dozens.
LIMIT_MS = 1000.0
# Beyond so many keys the record forgets: a run of hours must not fill the memory.
_MOST_KEYS = 2_000_000
_is_well_formed = re.compile(r"(?:[^%\s{}]|%[0-9A-F]{2})+(?:%~[0-9a-f]{32})?").fullmatch


class FindingError(AssertionError):
    """Something that must hold does not."""


@dataclass
class Record:
    """Counts and digests of a run."""

    inputs: int = 0
    distinct_keys: int = 0
    slowest_ms: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    # Digests alone: of a template and a key, what texts made it; and the other way round.
    _seen: dict[bytes, bytes] = field(default_factory=dict)

    def outcome(self, function: Callable[[], object], *expected: type[Exception]) -> object:
        """Return the value of `function`, or None if it raises an expected error."""
        result, took_ms = self._timed(function, expected)
        if took_ms > LIMIT_MS:
            result, again_ms = self._timed(function, expected)
            took_ms = min(took_ms, again_ms)
        if took_ms > LIMIT_MS:
            raise FindingError(f"took {took_ms:.0f} ms, at most {LIMIT_MS:.0f} are allowed")
        self.slowest_ms = max(self.slowest_ms, took_ms)
        if isinstance(result, Exception):
            self.errors[type(result).__name__] += 1
            return None
        return result

    def remember(self, scope: str, texts: Sequence[str], made: str) -> None:
        """Raise FindingError if other texts made this key, or these texts another key."""
        if len(self._seen) > _MOST_KEYS:
            self._seen.clear()
        key_digest, texts_digest = _digest("key", scope, made), _digest("texts", scope, *texts)
        if key_digest not in self._seen:
            self.distinct_keys += 1
        if self._seen.setdefault(key_digest, texts_digest) != texts_digest:
            raise FindingError(f"{made!r} is the key of {_brief(texts)} and of other texts")
        if self._seen.setdefault(texts_digest, key_digest) != key_digest:
            raise FindingError(f"{_brief(texts)} has the key {made!r} and another one")

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {n:,}" for name, n in sorted(self.errors.items())) or "none"
        return (
            f"{self.inputs:,} inputs, {self.distinct_keys:,} distinct keys, errors: {errors};"
            f" slowest {self.slowest_ms:.1f} ms"
        )

    def _timed(
        self, function: Callable[[], object], expected: tuple[type[Exception], ...]
    ) -> tuple[object, float]:
        started_s = time.thread_time()
        try:
            result = function()
        except (*expected, OwnError) as error:
            result = error
        except FindingError:
            raise
        except Exception as error:
            raise FindingError(
                f"{type(error).__name__}, which is not documented: {error}"
            ) from error
        return result, (time.thread_time() - started_s) * 1000


def _digest(*parts: str) -> bytes:
    lengths = ",".join(str(len(part)) for part in parts)
    return hashlib.blake2b(
        (lengths + "".join(parts)).encode(errors="surrogatepass"), digest_size=16
    ).digest()


class _Brief(reprlib.Repr):
    """`repr` of anything: cyclic, deep, of megabytes, or raising."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 300

    def repr_int(self, number: int, level: int) -> str:
        bits = number.bit_length()
        return super().repr_int(number, level) if bits < 2000 else f"<int of {bits:,} bits>"

    def repr_Call(self, call: Call, level: int) -> str:  # noqa: N802 - named by the class
        return self.repr1(dict(call.arguments), level)


_brief = _Brief().repr


def task(x: object, y: object = 1, z: object = "z", guard: object = None) -> None: ...


def plain(a, b=2, guard=None, *, c=3): ...
def positional(a, /, b, *, c): ...
def collecting(a, b=2, *rest, c=3, **kw): ...
def open_ended(a, /, **kw): ...


def compiled(spec: object, record: Record, function: object = task) -> KeyFunction | None:
    """The key function, None where the spec is refused."""
    return record.outcome(  # type: ignore[return-value]
        lambda: compile_key(spec, signature=inspect.signature(function), task="t"),  # type: ignore[arg-type]
        KeyTemplateError,
    )


def assert_well_formed(made: object) -> None:
    if type(made) is not str:
        raise FindingError(f"the key is of {type(made)}")
    if not made.isprintable() or not _is_well_formed(made):
        raise FindingError(f"the key {made!r} has characters that keys must not have")
    if not 0 < len(made.encode()) <= MAX_KEY_BYTES:
        raise FindingError(f"the key has {len(made.encode())} bytes: {made!r}")


def made_by(keys: KeyFunction, arguments: Mapping[str, object], record: Record) -> tuple[str, ...]:
    """The well-formed keys of a call; none where it is refused."""
    found = record.outcome(lambda: keys((), arguments), KeyArgumentError)
    if found is None:
        return ()
    assert isinstance(found, tuple)
    for made in found:
        assert_well_formed(made)
    if list(found) != sorted(set(found)):
        raise FindingError(f"the keys are not sorted, or twice there: {found}")
    return found


def check(template: str, calls: Sequence[Call], record: Record, *, is_right: bool = False) -> None:
    """One template, and calls with its arguments, in every way in which a key can be made."""
    keys = compiled(template, record)
    if keys is None:
        if is_right:
            raise FindingError("the template is right, and refused")
        return
    listed = compiled([template, "fixed"], record)
    called = compiled(lambda **values: key(template, **values), record)
    assert listed is not None
    assert called is not None
    for call in calls:
        made = made_by(keys, call.arguments, record)
        known = call.texts is not None and max(map(len, call.texts), default=0) <= MAX_TEXT_CHARS
        if not made:
            if known:
                raise FindingError(f"{_brief(call.texts)} is refused by {template!r}")
            continue
        if call.texts is not None:
            record.remember(template, call.texts, made[0])
        whole = call.whole_key
        if whole is not None and len(whole.encode()) <= MAX_KEY_BYTES and made != (whole,):
            raise FindingError(f"{made} instead of {whole!r}")
        with decimal.localcontext() as context:
            context.prec, context.capitals, context.rounding = 2, 0, decimal.ROUND_UP
            ways = {
                "another decimal context": made_by(keys, call.arguments, record),
                "a callable": made_by(called, call.arguments, record),
                "a list": made_by(listed, call.arguments, record),
            }
        ways["a list"] = tuple(k for k in ways["a list"] if k != "fixed") or ("fixed",)
        for way, others in ways.items():
            if others != made:
                raise FindingError(f"{made} alone, by {way} {others}")


def check_spec(spec: object, arguments: Mapping[str, object], record: Record) -> None:
    """Anything as a key option."""
    keys = compiled(spec, record)
    if keys is not None:
        if callable(spec):  # its exceptions are its own
            return
        made_by(keys, arguments, record)


def check_result(result: object, record: Record) -> None:
    """Anything as a callable's result; of texts, different ones make different keys."""
    keys = compiled(lambda **_: result, record)
    assert keys is not None
    made = made_by(keys, {"x": 1}, record)
    if made and isinstance(result, list) and all(type(text) is str for text in result):
        if len(made) != len(set(result)):
            raise FindingError(f"{_brief(result)} made {len(made)} keys: {made}")
        if len(made) == 1:
            record.remember("", result[:1], made[0])


def check_binding(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[object, object],
    record: Record,
) -> None:
    """Arguments that do not fit are a TypeError where Python says so, and there alone."""
    signature = inspect.signature(function)
    signature = signature.replace(
        parameters=[p for name, p in signature.parameters.items() if name != "guard"]
    )
    keys = compiled("<a|hash>", record, function)
    assert keys is not None
    try:
        signature.bind(*args, **kwargs)  # type: ignore[arg-type]
    except TypeError:
        expected: tuple[type[Exception], ...] = (TypeError,)
    else:
        expected = (KeyArgumentError,)
    made = record.outcome(lambda: keys(args, kwargs), *expected)  # type: ignore[arg-type]
    if made is not None and expected == (TypeError,):
        raise FindingError(f"{function.__name__} took arguments that do not fit")


def check_input(choices: Choices, record: Record) -> None:
    """Make an input and check it; the error of a finding says what was tried."""
    record.inputs += 1
    kind = choices.integer(0, 9)
    described: tuple[object, ...] = ()
    try:
        if kind < 5:
            plan, calls = planned(choices)
            described = (plan.template, calls)
            check(plan.template, calls, record, is_right=plan.is_right)
        elif kind < 7:
            template, calls = any_template(choices), any_calls(choices)
            described = (template, calls)
            check(template, calls, record)
        elif kind < 8:
            spec, value = any_spec(choices), any_value(choices)
            described = (spec, value)
            check_spec(spec, {"x": value}, record)
        elif kind < 9:
            result = any_result(choices)
            described = (result,)
            check_result(result, record)
        else:
            function = pick(choices, (plain, positional, collecting, open_ended))
            args = [any_value(choices) for _ in range(choices.integer(0, 3))]
            names = ("a", "b", "c", "kw", "rest", "guard", "self", 1, "é")
            kwargs = {
                pick(choices, names): any_value(choices) for _ in range(choices.integer(0, 3))
            }
            described = (function.__name__, args, kwargs)
            check_binding(function, args, kwargs, record)
    except FindingError as finding:
        shown = "".join(f"\n  {_brief(part)}" for part in described)
        raise FindingError(f"{finding}\nThe input:{shown}") from finding.__cause__
