"""Check the record of a storm against the invariants S1 to S8, L1, L3 and L4.

Each `_s…` and `_l…` yields the violations it found, in words. The class counts what occurred,
because a storm without stale commits and second holders proves nothing. The time until a takeover
(L2) is a figure of the report: no machine has to be fast here. How soon a holder learns of a lost
lease (L5) is checked in the simulation and in `tests/faults`.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm.audit import Change
    from storm.scenario import Record

__all__ = ["Findings", "double_and_lost"]

_FINAL = ("DONE", "DEAD")


def double_and_lost(record: Record) -> tuple[int, int]:
    """Return the number of surplus effects, and of items without an effect."""
    effects = Counter(item for item, _ in record.effects)
    expected = {item.name for item in record.items}
    double = sum(count - 1 for count in effects.values())
    return double, len(expected - set(effects))


class Findings:
    """All violations, and counts of what occurred."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in record.lines:
            self.events[line["name"]].append(line)
        self.keys: dict[str, list[Change]] = defaultdict(list)
        self.work_items: dict[str, list[Change]] = defaultdict(list)
        for change in record.changes:
            (self.keys if change.kind == "key" else self.work_items)[change.name].append(change)
        self.done_us = {
            change.name: change.at_us
            for change in reversed(record.changes)
            if change.state == "DONE"
        }
        self.wrong = [
            f"{check.__name__[1:3].upper()}: {text}" for check in self._checks() for text in check()
        ]

    def _checks(self) -> list[Callable[[], Iterator[str]]]:
        return [
            self._s1_tokens_grow, self._s2_one_effect, self._s3_no_late_commit,
            self._s4_leases_end_by_their_holder, self._s5_leases_are_disjoint,
            self._s6_ends_are_final, self._s7_answers_are_true, self._s8_ok_is_committed,
            self._l1_everything_is_done, self._l4_nothing_is_left,
        ]  # fmt: skip

    # -- safety -------------------------------------------------------------------------------

    def _s1_tokens_grow(self) -> Iterator[str]:
        """If a grant was answered before another was requested, it has the lower token."""
        grants = defaultdict(list)
        for line in self.events["claimed"]:
            grants[line["key"]].append((line["t"] - line["took_s"], line["t"], line["fence"]))
        for key, several in grants.items():
            for asked, _, fence in several:
                before = [other for _, answered, other in several if answered < asked]
                if before and max(before) >= fence:
                    yield f"{key}: {fence} was granted after {max(before)}"

    def _s2_one_effect(self) -> Iterator[str]:
        for item, count in Counter(item for item, _ in self.record.effects).items():
            if count > 1:
                yield f"{item} has {count} effects"

    def _s3_no_late_commit(self) -> Iterator[str]:
        """No end of work carries a token below its key's last one."""
        for key, changes in self.work_items.items():
            for change in changes:
                if change.state != "DONE" or change.old_state == "DONE":
                    continue
                later = [k.fence for k in self.keys[key] if k.id < change.id]
                if max(later, default=0) > change.fence:
                    yield f"{key}: DONE by {change.fence}, and {max(later)} had been granted"
        last: dict[str, int] = defaultdict(int)
        for line in self.events["claimed"]:
            last[line["key"]] = max(last[line["key"]], line["fence"])
        for line in self.events["completed"]:
            if line["fence"] < last[line["key"]]:
                yield f"{line['key']}: {line['fence']} completed, {last[line['key']]} was the last"

    def _s4_leases_end_by_their_holder(self) -> Iterator[str]:
        """A holder that was refused had been overtaken, or its lease had expired."""
        for line in self.events["stale_refused"]:
            for key in line["key"].split(", "):
                fence = line["fence"]
                overtaken = any(change.fence > fence for change in self.keys[key])
                # None: a crash of the database lost the claim.
                until = [c.until for c in self.keys[key] if c.fence == fence and c.owner]
                if until and not overtaken and max(until) > line["at_us"]:
                    yield f"{key}: {fence} was refused within its lease, without a newer claim"

    def _s5_leases_are_disjoint(self) -> Iterator[str]:
        """By the database's clock, a key gets a new holder only after its lease has expired or was
        ended."""
        for key, changes in self.keys.items():
            for change in changes:
                passed_on = change.old_owner and change.owner and change.owner != change.old_owner
                if passed_on and (change.old_until or 0) > change.at_us:
                    yield f"{key}: taken from {change.old_owner} before its lease ran out"

    def _s6_ends_are_final(self) -> Iterator[str]:
        for name, changes in (*self.work_items.items(), *self.keys.items()):
            for change in changes:
                if change.old_state in _FINAL and change.state != change.old_state:
                    yield f"{name}: {change.old_state} became {change.state}"
                if change.old_fence is not None and change.fence < change.old_fence:
                    yield f"{name}: the token went back from {change.old_fence} to {change.fence}"

    def _s7_answers_are_true(self) -> Iterator[str]:
        """Work that was answered as done is done. A superseded message had been deferred or retried
        before."""
        for line in self.events["duplicate"]:
            key = line["key"]
            if line["reason"] == "done":
                if not self._was_done(line, key):
                    yield f"{key}: answered as done, and it was not"
            elif line["reason"] == "superseded":
                earlier = [
                    other
                    for other in (*self.events["deferred"], *self.events["claimed"])
                    if other["message"] == line["message"] and other["t"] < line["t"]
                ]
                if not earlier and not self._was_done(line, key):
                    yield f"{key}: {line['message']} was dropped, and nothing had superseded it"

    def _s8_ok_is_committed(self) -> Iterator[str]:
        """Work that was reported as "ok" is DONE. Refused work left nothing. An effect has its
        work's token."""
        for line in self.events["reported"]:
            if line["how"] == "ok" and not self._was_done(line, f"item:{line['item']}"):
                yield f"{line['item']}: reported ok, and it was not done"
        effects = dict(self.record.effects)
        for line in self.events["stale_refused"]:
            item = line["key"].partition(":")[2]
            if effects.get(item) == line["fence"]:
                yield f"{item}: the commit of {line['fence']} was reported stale, and it happened"
        for key, changes in self.work_items.items():
            item = key.partition(":")[2]
            if item in effects and changes[-1].fence != effects[item]:
                yield f"{item}: done by {changes[-1].fence}, its effect is of {effects[item]}"

    def _was_done(self, line: dict[str, Any], key: str) -> bool:
        """Return whether the work was done when the line was written. In the end all work is."""
        return self.done_us.get(key, line["at_us"] + 1) <= line["at_us"]

    # -- liveness -----------------------------------------------------------------------------

    def _l1_everything_is_done(self) -> Iterator[str]:
        """All work is done. That is L3, too: a lock server that lost its state shuts out no
        work."""
        effects = {item for item, _ in self.record.effects}
        for item in self.record.items:
            if item.name not in effects:
                yield f"{item.name} ({item.kind}) has no effect"
            if item.kind == "halves" and f"{item.name} half" not in effects:
                yield f"{item.name} lacks its first half"
            if self.record.work_items.get(f"item:{item.name}") != "DONE":
                yield f"{item.name} is {self.record.work_items.get(f'item:{item.name}')}"
        # A broker loses what a worker had just taken from it when it was killed.
        killed = self.record.faults["worker killed"]
        if self.record.resent > killed:
            yield f"{self.record.resent} were sent again for {killed} killed workers"
        # One that is deferred, one that the broker restored, and those that the storm published.
        if self.record.most_copies > 12:
            yield f"{self.record.most_copies} live copies of one message"

    def _l4_nothing_is_left(self) -> Iterator[str]:
        if self.record.lock_keys:
            yield f"the lock server still has {self.record.lock_keys[:5]}"
        for key, changes in self.keys.items():
            if changes[-1].owner:
                yield f"{key} is still {changes[-1].owner}'s"
        if len(self.keys) != len(self.work_items):
            yield f"{len(self.keys)} keys and {len(self.work_items)} work items"

    # -- what there was to see ----------------------------------------------------------------

    @property
    def takeover_s(self) -> list[float]:
        """Return how long keys with an expired lease waited for their next holder."""
        return [
            (change.at_us - (change.old_until or 0)) / 1e6
            for changes in self.keys.values()
            for change in changes
            if change.old_owner and change.owner not in ("", change.old_owner)
        ]

    @property
    def second_holders(self) -> int:
        """Return the holders that were overtaken and learned of it."""
        heard = [*self.events["stale_refused"], *self.events["lost"]]
        return len({(line["key"], line["fence"]) for line in heard})

    def seen(self) -> dict[str, int | str]:
        """Return counts for the report."""
        answers = Counter(line["reason"] for line in self.events["duplicate"])
        return {
            "items": len(self.record.items),
            "messages published": self.record.published,
            "bodies begun": len(self.events["began"]),
            "faults": sum(self.record.faults.values()),
            "answered as done": answers["done"],
            "dropped as superseded": answers["superseded"],
            "put off": len(self.events["deferred"]),
            "takeovers": len(self.events["takeover"]),
            "a key waits when its lease is over, median s": (
                f"{statistics.median(self.takeover_s):.1f}" if self.takeover_s else "-"
            ),
            "second holders": self.second_holders,
            "stale commits refused": len(self.events["stale_refused"]),
            "COMMIT replies lost": self.record.commits_lost,
            "lock server gave no answer": len(self.events["lock_unavailable"]),
            "most live copies of a message": self.record.most_copies,
            "sent again, as a sweep would": self.record.resent,
        }
