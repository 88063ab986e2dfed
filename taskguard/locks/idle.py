"""A queue of idle connections that needs no locks.

Guarantees: an exception of a signal handler, as a time limit raises it, leaves no lock held. The
queues of Python's library may stay locked then, so that all calls wait for ever.
Does not guarantee that exactly `maxsize` items are kept if threads put some at the same time.
"""

from __future__ import annotations

import queue
from typing import Any

__all__ = ["IdleQueue"]


class IdleQueue(queue.LifoQueue[Any]):
    """A pool's queue of idle connections, for example urllib3's: last in, first out.

    It never blocks, because the methods of a list are atomic.
    """

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return an item. Raises `queue.Empty`."""
        del block, timeout
        try:
            return self.queue.pop()
        except IndexError:
            raise queue.Empty from None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Keep an item. Raises `queue.Full`."""
        del block, timeout
        if len(self.queue) >= self.maxsize:
            raise queue.Full
        self.queue.append(item)
