"""The fuzzed properties for a short time, with the same inputs in every run.

`properties.py` has the guarantees and limits. `make fuzz` runs for longer, guided by coverage.
"""

from __future__ import annotations

from fuzz.inputs import Choices, FromBytes
from fuzz.properties import Record, check_input
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


class Drawn:
    """Choices made by Hypothesis, which makes a finding small."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def text(self, alphabet: str | None, max_chars: int) -> str:
        characters = st.characters() if alphabet is None else st.sampled_from(alphabet)
        return self._data.draw(st.text(characters, max_size=max_chars))


def fuzzed(examples: int):
    """Return `given` with the same inputs in every run, so that a new finding belongs to the change
    under test."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


RECORD = Record()


@fuzzed(800)
@given(st.data())
def test_whatever_comes(data: st.DataObject) -> None:
    """Well-formed keys, one for each text, in 50 ms; or the documented errors."""
    choices: Choices = Drawn(data)
    check_input(choices, RECORD)


@fuzzed(1000)
@given(st.binary(max_size=300))
def test_whatever_bytes_come(data: bytes) -> None:
    """The properties hold for inputs that `make fuzz` would read from bytes."""
    check_input(FromBytes(data), RECORD)
