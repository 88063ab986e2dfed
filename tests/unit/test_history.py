"""Tests of the format of a history, and of reading one that was cut."""

from __future__ import annotations

import pytest

from taskguard.ledger.tables import METADATA
from taskguard.model.history import (
    HISTORY_CHARS,
    TEXT_CHARS,
    Happened,
    Happening,
    brief,
    entry,
    read,
    works_of,
)

HOSTILE = [
    'ValueError: it\'s "quoted" \\ and %s :name %(name)s',
    '", "done", 1, ""]\n[1, "dead", "forged", 1, "forged"]',
    "\x1b[31mred\x07\x00\x9b1m",
    "\u202egnp.exe\u200b\ufeff\u2028next",
    "\ud800 alone",
    "\N{PILE OF POO}" * 1_000,
    "\\" * 1_000,
    "",
    "\n \r\n",
]


def test_no_index_has_the_state() -> None:
    """PostgreSQL counts columns of an index's condition, too: no completion would be HOT."""
    indexes = [index for table in METADATA.tables.values() for index in table.indexes]
    texts = [f"{list(index.columns)} {index.info.get('where', '')}" for index in indexes]
    assert texts
    assert not [text for text in texts if "state" in text]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_comes_back_on_one_line_without_control_characters(text: str) -> None:
    line = entry(7, Happened.FAILED, owner="00/m", fence=5, text=text)
    [found] = read(line)
    assert found[:4] == (7, Happened.FAILED, "00/m", 5)
    assert found.text == brief(text)
    assert len(found.text) <= TEXT_CHARS
    assert found.text == "" or found.text.isprintable()
    assert line.count("\n") == 1
    line.encode()  # a lone surrogate would fail, here and in a database


def test_only_the_first_line_of_an_error_is_kept() -> None:
    assert brief("ValueError: no\nsecret='x'\nTraceback") == "ValueError: no"
    assert brief("x" * 1_000).endswith("x...")


@pytest.mark.parametrize("cut", [1, 10, 100, 333, 800])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_reader_drops_a_first_line_that_was_cut(text: str, cut: int) -> None:
    """The database keeps the last characters, wherever a line of it begins."""
    lines = [entry(at, Happened.FAILED, owner="00/[m]", fence=at, text=text) for at in range(9)]
    stored = "".join(lines)[-HISTORY_CHARS:]
    assert (read(stored)[0].what is Happened.CUT) is (len(stored) == HISTORY_CHARS)
    found = read(stored[cut:])
    assert [each.at_us for each in found] == list(range(9 - len(found), 9))
    assert {each.text for each in found} == ({brief(text)} if found else set())


def test_no_cut_makes_another_happening() -> None:
    lines = "".join(entry(1, Happened.DEAD, owner="00/m", fence=2, text=text) for text in HOSTILE)
    for start in range(len(lines)):
        found = read(lines[start:])
        found = found[1:] if found[:1] and found[0].what is Happened.CUT else found
        assert all(each[:4] == (1, Happened.DEAD, "00/m", 2) for each in found)


def test_what_a_later_version_wrote_is_not_lost() -> None:
    assert read('[1, "moved", "00/m", 2, "far away"]\n') == [
        Happening(1, Happened.OTHER, "00/m", 2, "moved: far away")
    ]


def test_no_history_has_no_happenings() -> None:
    assert read(None) == read("") == []
    assert works_of(None) == works_of("") == []


def test_works_are_whole_ids() -> None:
    assert works_of("b 1\na 1\ncut o") == ["b 1", "a 1"]
