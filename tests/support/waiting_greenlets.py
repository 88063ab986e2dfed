"""Greenlets that wait for one key of a lock provider: `python -m support.waiting_greenlets URL`.

Prints how many got it, and for how long the loop stood still at most.
"""

# ruff: noqa: E402
from gevent import monkey

monkey.patch_all()

import json
import sys
import time

import gevent

from support.waiting import patience_s
from taskguard.locks.base import Granted
from taskguard.model.lease import new_owner
from taskguard.settings import make_locks


def main(url: str, count: int) -> None:
    locks = make_locks(url)
    assert locks is not None
    holder, got, stood_still_s = new_owner("holder"), [], [0.0]
    locks.acquire(("k",), holder, ttl_s=60.0, with_fence=True, wait_s=0.0)

    def wait() -> None:
        me = new_owner("m")
        while not isinstance(
            answer := locks.acquire(("k",), me, ttl_s=60.0, with_fence=True, wait_s=30.0), Granted
        ):
            locks.wait(answer.key, me, timeout_s=30.0)
        got.append(answer.fence)
        locks.release(("k",), me)

    def tick() -> None:
        while len(got) < count:
            began_s = time.monotonic()
            gevent.sleep(0.01)
            stood_still_s[0] = max(stood_still_s[0], time.monotonic() - began_s)

    waiters = [gevent.spawn(wait) for _ in range(count)]
    ticking = gevent.spawn(tick)
    gevent.sleep(1.5)
    locks.release(("k",), holder)
    gevent.joinall([*waiters, ticking], timeout=patience_s())
    locks.close()
    print(json.dumps({"got": len(set(got)), "stood_still_s": stood_still_s[0]}))


if __name__ == "__main__":
    main(sys.argv[1], 10)
