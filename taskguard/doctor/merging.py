"""Merge findings that differ only in where they are: a hundred tasks can lack one setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from taskguard.findings import Finding

__all__ = ["merged"]

_NAMED = 3
_KINDS = ("the task ", "the job ", "the queue ")


def merged(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yield each finding once, with the first three places that have it."""
    places: dict[Finding, list[str]] = {}
    for each in found:
        places.setdefault(replace(each, where=""), []).append(each.where)
    for finding, where in places.items():
        yield replace(finding, where=_listed(sorted(where)))


def _listed(places: Sequence[str]) -> str:
    """Return `the task ship`, or `the tasks bill, pack, ship, and 3 more`."""
    kind = next((each for each in _KINDS if places[0].startswith(each)), "")
    if len(places) > 1 and kind and all(each.startswith(kind) for each in places):
        names = [each.removeprefix(kind) for each in places[:_NAMED]]
        named = f"{kind.rstrip()}s {', '.join(names)}"
    else:
        named = ", ".join(places[:_NAMED])
    more = len(places) - _NAMED
    return f"{named}, and {more} more" if more > 0 else named
