"""A crash rig whose workers can request other faults than being killed.

| fault | what happens to the process that requests it |
| --- | --- |
| flush | the lock server is emptied |
| forget | the lock server loses this line, and no other |
| locks | the reply to its next script at the lock server is lost |
| commit | the reply to its next COMMIT is lost, after it took effect |
| publish | the broker's answer to the next message that it publishes is lost |
| broker | the broker is killed, and restarted with the messages it has acknowledged |

The broker dies after the test has sent the whole line. Each loss breaks the connection. Workers
reach the servers of queue and locks, and the database (PostgreSQL or MariaDB), through proxies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from support.crash_rig import CrashRig, crash_rig
from support.fault_injection import FaultInjector
from support.proxy import Proxy
from support.replies import asks, ends_transaction
from support.waiting import wait_until

__all__ = ["FAULTS", "faulty_rig"]

FAULTS = ("flush", "locks", "commit", "publish")
"""The faults that come alone: all of them may be asked for by one set of workers."""

_TTL_S = "5"  # long enough for any delay: an expired lease would hide a fault
_BASIC_PUBLISH = b"\0\x3c\0\x28"


@contextmanager
def faulty_rig(
    queue: str,
    broker: Any,
    valkey: Any,
    database: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **variables: str,
) -> Iterator[tuple[CrashRig, FaultInjector]]:
    """Return a rig of "celery" or "rq" on `broker`, the test's own server, with locks on
    `valkey`."""
    there = sa.make_url(database)
    backend = there.get_backend_name()
    with ExitStack() as stack:
        to_broker, to_locks, to_ledger = (
            stack.enter_context(Proxy(port)) for port in (broker.port, valkey.port, there.port)
        )
        by_redis = broker.url.startswith("redis")
        direct = broker.url_of(2) if by_redis else broker.url

        def through(url: str, proxy: Proxy) -> str:
            given = sa.make_url(url)
            return url.replace(f":{given.port}", f":{proxy.port}")

        def flush(*_: Any) -> None:
            with redis.Redis.from_url(valkey.url_of(1)) as client:
                client.flushdb()

        def forget(_: int, line: str) -> None:
            with redis.Redis.from_url(valkey.url_of(1)) as client:
                known = list(client.scan_iter(match=f"*line:{line}*"))
                if known:
                    client.delete(*known)

        def restart(_: int, line: str) -> None:
            wait_until((folder / f"sent {line}").exists)
            if by_redis:
                _wait_until_fetched(direct)
            broker.kill()
            broker.start()

        faults: Mapping[str, Callable[[int, str], object]] = {
            "flush": flush,
            "forget": forget,
            "broker": restart,
            "locks": lambda pid, _: to_locks.lose_reply_of(
                pid, asked=lambda data: b"EVALSHA" in data
            ),
            "commit": lambda pid, _: to_ledger.lose_reply_of(
                pid, asked=partial(asks, backend), answered=partial(ends_transaction, backend)
            ),
            "publish": lambda pid, _: to_broker.lose_reply_of(
                pid, asked=lambda data: (b"PUSH" if by_redis else _BASIC_PUBLISH) in data
            ),
        }
        injector = stack.enter_context(FaultInjector(faults))
        settings = {
            "CRASH_FAULTS": str(injector.port),
            "CRASH_BROKER": through(direct, to_broker),
            "CRASH_LOCKS": through(valkey.url_of(1), to_locks),
            "CRASH_LEDGER": through(database, to_ledger),
            "CRASH_RESULTS": valkey.url_of(3),
            "CRASH_TTL_S": _TTL_S,
            **variables,
        }
        rig = crash_rig(queue, database, valkey, folder, monkeypatch, broker=direct, **settings)
        made = stack.enter_context(rig)
        made.faults = injector.counts
        yield made, injector
        proxies = {"locks": to_locks, "commit": to_ledger, "publish": to_broker}
        for fault, proxy in proxies.items():
            print(f"{fault}: {injector.counts[fault]} asked for, {proxy.hit} happened")


def _wait_until_fetched(url: str) -> None:
    """Wait until no message is between Redis and a worker.

    kombu takes a message first, and tells Redis its worker afterwards. If Redis dies in between,
    the queue loses the message, whatever it had saved. This rig does not test that.
    """
    with redis.Redis.from_url(url) as client:
        seen: list[bool] = []

        def is_quiet() -> bool:
            names = ["rq:queue:crashing", *client.keys("crashing*")]
            seen.append(all(client.llen(name) == 0 for name in names))
            return seen[-20:] == [True] * 20

        wait_until(is_quiet, interval_s=0.1)
