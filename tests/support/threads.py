"""The same in several threads, begun together."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["at_once"]


def at_once(count: int, body: Callable[[int], None]) -> None:
    """`body` in as many threads; the first of their exceptions is the test's."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            body(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
