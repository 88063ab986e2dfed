"""redis-py's tests of its `Lock`, with `tg.lock()` in its place.

The class translates arguments and errors, and nothing else. A lock with a timeout is not renewed
beyond it (`max_hold_s`), as redis-py's is not. The tests' client reads and writes taskguard's entry
of a key, under redis-py's name of it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

import redis.lock

import taskguard
from taskguard.errors import LeaseLostError, LockNotOwnedError, TaskguardError

_tg = taskguard.connect(
    locks=f"redis://127.0.0.1:{os.environ['FOREIGN_REDIS_PORT']}/0", ledger=None
)
_entries: dict[str, str] = {}
_made: list[taskguard.Lock] = []
_execute = redis.Redis.execute_command


def show_entry(name: str, key: str) -> None:
    """Let clients find the lock's entry for `key` under `name`."""
    _entries[name] = f"taskguard:{{{key}}}"


def lock_of(key: str, ttl_s: float | None, **options: Any) -> taskguard.Lock:
    """Return a lock whose lease ends after `ttl_s`. None: a lease that is always renewed."""
    given = {} if ttl_s is None else {"ttl_s": ttl_s, "max_hold_s": ttl_s}
    _made.append(_tg.lock(key, **{**given, **options}))
    return _made[-1]


def pytest_runtest_teardown() -> None:
    """Release the locks that a test left. The thread of all tests would stay their holder."""
    while _made:
        with contextlib.suppress(TaskguardError):
            _made.pop().release()


def release_from_all(key: str) -> None:
    """Take the key from its holder, whichever it is."""
    _tg.release(key)


def _execute_on_entry(client: Any, *args: Any, **options: Any) -> Any:
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], _entries.get(args[1], args[1]), *args[2:])
    return _execute(client, *args, **options)


redis.Redis.execute_command = _execute_on_entry  # type: ignore[method-assign]


class _Lock(redis.lock.Lock):
    def __init__(self, client: Any, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(client, name, *args, **kwargs)
        show_entry(name, name)
        self._token = None if self.thread_local else uuid.uuid4().hex
        self._lock = lock_of(name, self.timeout, token=self._token)

    def acquire(
        self,
        sleep: Any = None,
        blocking: bool | None = None,
        blocking_timeout: Any = None,
        token: str | None = None,
    ) -> bool:
        del sleep
        waits = self.blocking if blocking is None else blocking
        longest_s = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        wait_s = longest_s if waits else 0
        lock = lock_of(self.name, self.timeout, wait_s=wait_s, token=token or self._token)
        lease = lock.acquire()
        if lease is not None:
            self._lock, self.local.token = lock, str(lease.owner).encode()
        return lease is not None

    def release(self) -> None:
        self.local.token = None
        with self._errors():
            self._lock.release()

    def extend(self, additional_time: Any, replace_ttl: bool = False) -> Any:
        with self._errors():
            self._lock.extend()
        if not replace_ttl or additional_time != self.timeout:
            raise NotImplementedError
        return True

    def reacquire(self) -> Any:
        with self._errors():
            self._lock.extend()
        return True

    def locked(self) -> bool:
        return self._lock.locked()

    def owned(self) -> bool:
        return self._lock.owned()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except LockNotOwnedError as error:
            raise redis.lock.LockError(str(error), lock_name=self.name) from error
        except LeaseLostError as error:
            raise redis.lock.LockNotOwnedError(str(error), lock_name=self.name) from error


redis.lock.Lock = _Lock  # type: ignore[misc]
