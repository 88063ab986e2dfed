"""Threads of a test: one function in each, or a queue of messages for all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from support.waiting import patience_s, wait_until
from taskguard.errors import TransactionRetryError

__all__ = ["at_once", "work_off"]


def at_once(count: int, body: Callable[[int], None]) -> None:
    """Run `body` in so many threads at once, and raise the first of their exceptions."""
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


def work_off(
    queue: deque[int],
    deliver: Callable[[int], None],
    failures: list[str],
    until: Callable[[], bool],
) -> None:
    """Let four threads deliver the messages of the queue until `until()`. None may fail."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                number = queue.popleft()
            except IndexError:
                ended.wait(0.002)
                continue
            try:
                deliver(number)
            except TransactionRetryError:
                queue.append(number)
            except Exception as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: failures or until())
    finally:
        ended.set()
        for thread in threads:
            thread.join(patience_s())
    assert failures == []
