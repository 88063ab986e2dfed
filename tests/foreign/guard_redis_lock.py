"""python-redis-lock's tests of its `Lock`, with `tg.lock()` in its place.

Its locks belong to an id, so each is a lock with a token. The class translates arguments and
errors, and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis_lock

from foreign.guard_redis import (
    lock_of,
    pytest_runtest_teardown,
    release_from_all,
    show_entry,
)
from taskguard.errors import LeaseLostError, LockNotOwnedError

__all__ = ["pytest_runtest_teardown"]


class _Lock(redis_lock.Lock):  # type: ignore[misc]
    def __init__(self, redis_client: Any, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(redis_client, name, *args, **kwargs)
        self._key = name
        show_entry(self._name, name)
        self._lock = self._waiting(0)

    def _waiting(self, wait_s: float | None) -> Any:
        renewed = {"max_hold_s": None} if self._lock_renewal_interval else {}
        return lock_of(self._key, self._expire, wait_s=wait_s, token=self._id, **renewed)

    def acquire(self, blocking: bool = True, timeout: Any = None) -> bool:
        if self._lock.owned():
            raise redis_lock.AlreadyAcquired
        lock = self._waiting((float(timeout) if timeout else None) if blocking else 0)
        lease = lock.acquire()
        if lease is not None:
            self._lock = lock
        return lease is not None

    def release(self) -> None:
        with _errors():
            self._lock.release()

    def extend(self, expire: Any = None) -> None:
        lock = self._lock if expire is None else lock_of(self._key, float(expire), token=self._id)
        with _errors():
            lock.extend()

    def reset(self) -> None:
        release_from_all(self._key)

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def get_owner_id(self) -> str | None:
        owner = super().get_owner_id()
        return None if owner is None else owner.partition("/")[2]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (LockNotOwnedError, LeaseLostError) as error:
        raise redis_lock.NotAcquired(str(error)) from error


redis_lock.Lock = _Lock
