"""Named placeholders become PostgreSQL's numbers, once for each statement."""

from __future__ import annotations

from taskguard.ledger.connections.libpq import numbered


def test_each_name_has_one_number_however_often_it_occurs() -> None:
    """In the order of their first places; a doubled percent sign is one."""
    found = numbered("select %(b)s, %(a)s, 7 %% 2, %(b)s::text, '%%(a)s'")
    assert found.text == "select $1, $2, 7 % 2, $1::text, '%(a)s'"
    assert found.names == ("b", "a")


def test_a_statement_is_read_once() -> None:
    """A long statement is converted once, because that takes time."""
    assert numbered("select %(a)s") is numbered("select %(a)s")
