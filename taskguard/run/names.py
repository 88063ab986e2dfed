"""Names of workers: stores that of this worker, and reads those of holders.

Guarantees: a worker is stored at its start or first claim, once for all its processes. After that
no delivery pays for it: the thread that renews leases notes three times an hour that the worker was
seen. A name is read once by all processes of a worker, a missing name once a minute. If the ledger
gives no answer, a holder is named by its number and pid, and no delivery fails.

The memory that forks share has no lock. Each of its texts has a checksum, so a text that two
processes write at once counts as missing.
"""

from __future__ import annotations

import logging
import mmap
import re
import struct
import time
import zlib
from typing import TYPE_CHECKING

from taskguard.errors import TaskguardError
from taskguard.model.lease import Owner
from taskguard.model.workers import nonces

if TYPE_CHECKING:
    from taskguard.ledger.ports import Workers

__all__ = ["SEEN_EVERY_S", "Names"]

logger = logging.getLogger("taskguard")

SEEN_EVERY_S = 1200.0
_AGAIN_S = 60.0
_PROCESS = re.compile(r"\bworker ([0-9a-f]{8}), pid (\d+)")  # as `Owner.process` has it
_MOST_NUMBERS = 4


class _Shared:
    """The latest texts about workers. Processes that fork share them."""

    _slots, _slot_bytes = 1024, 128
    # The checksum of what follows it, the time on the monotonic clock, the number, the length.
    _head = struct.Struct("<Id8sB")
    _skipped = 4

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._slots * self._slot_bytes)

    def __getitem__(self, number: str) -> tuple[float, str]:
        """Return when a text was stored, and the text, or (-inf, "")."""
        at = self._at(number)
        stored = self._memory[at : at + self._slot_bytes]
        checksum, at_s, of, length = self._head.unpack_from(stored)
        if of != number.encode() or zlib.crc32(stored[self._skipped :]) != checksum:
            return -float("inf"), ""
        text = stored[self._head.size : self._head.size + length]
        return at_s, text.decode("utf-8", "replace")

    def __setitem__(self, number: str, text: str) -> None:
        encoded = text.encode("utf-8", "replace")[: self._slot_bytes - self._head.size]
        head = self._head.pack(0, time.monotonic(), number.encode(), len(encoded))
        slot = (head + encoded).ljust(self._slot_bytes, b"\0")[self._skipped :]
        at = self._at(number)
        checksum = zlib.crc32(slot).to_bytes(self._skipped, "little")
        self._memory[at : at + self._slot_bytes] = checksum + slot

    def _at(self, number: str) -> int:
        return int(number, 16) % self._slots * self._slot_bytes


# Names by worker number. Under the number of this worker: the ledger that has its row.
_shared = _Shared()


class Names:
    """The names of workers in one ledger. Without a ledger, they have only numbers."""

    def __init__(self, ledger: Workers | None) -> None:
        self._ledger = ledger
        self._registered = ""  # this worker's number
        self._tried, self._again_at_s = "", 0.0

    def register(self) -> None:
        """Store this worker, unless one of its processes did."""
        if self._registered != nonces.number:
            self.refresh()

    @property
    def is_due(self) -> bool:
        """Whether `refresh()` has something to do."""
        if self._ledger is None or not nonces.registers:
            return False
        return self._tried != nonces.number or time.monotonic() >= self._again_at_s

    @property
    def is_old(self) -> bool:
        """Whether this worker is stored, and was seen a while ago."""
        return self._registered == nonces.number and self.is_due

    def refresh(self) -> None:
        """Store this worker, or note that it was seen, unless that was done a short while ago."""
        if self._ledger is None or not self.is_due:
            return
        now_s, number = time.monotonic(), nonces.number
        mark = f"{zlib.crc32(repr(self._ledger).encode()):08x}"
        noted_s, by = _shared[number]
        if nonces.is_forked and by == mark and now_s < noted_s + SEEN_EVERY_S:
            self._note(noted_s + SEEN_EVERY_S)
            return
        # Set it first: a time limit may end the statement.
        self._tried, self._again_at_s = number, now_s + _AGAIN_S
        try:
            self._store(self._ledger)
        except TaskguardError as error:
            logger.debug("the name of worker %s was not stored: %s", number, error)
            return
        _shared[nonces.number] = mark
        self._note(now_s + SEEN_EVERY_S)

    def _note(self, again_at_s: float) -> None:
        self._registered = self._tried = nonces.number
        self._again_at_s = again_at_s

    @staticmethod
    def _store(ledger: Workers) -> None:
        for _ in range(_MOST_NUMBERS):
            if ledger.register_worker(nonces.worker()):
                return
            nonces.draw()  # another worker has this number

    def named(self, owner: Owner | None) -> dict[str, str]:
        """Return a holder as events name it. A value that taskguard did not write has no name."""
        if owner is None or not owner.process:
            return {}
        return {"holder": owner.message, "held_by": self.described(owner)}

    def described(self, owner: Owner) -> str:
        """Return the holder's process and message, for errors and logs."""
        return owner.described_as(self.process(owner))

    def process(self, owner: Owner) -> str:
        """Return the holder's process, as "celery@web-3, pid 4711". "" if the nonce names none."""
        return self.told(owner.process)

    def told(self, text: str) -> str:
        """Return a text on record with the names of the processes that it has."""
        return _PROCESS.sub(lambda found: self._named(found[0], found[1], found[2]), text)

    def _named(self, plain: str, number: str, pid: str) -> str:
        """Return a process by the name of its worker, or `plain` if that is not known."""
        if self._ledger is None:
            return plain
        label = nonces.worker().label if number == nonces.number else self._label(number)
        return f"{label}, pid {pid}" if label else plain

    def _label(self, number: str) -> str:
        assert self._ledger is not None  # noqa: S101  # `process()` has asked
        noted_s, label = _shared[number]
        if label or time.monotonic() < noted_s + _AGAIN_S:
            return label
        try:
            found = self._ledger.worker(number)
        except TaskguardError as error:
            logger.debug("the name of worker %s was not read: %s", number, error)
            found = None
        label = "" if found is None else found.label
        _shared[number] = label
        return label
