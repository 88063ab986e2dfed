"""A provider in forked processes, in threads, and in greenlets: they share no connection."""

from __future__ import annotations

import pytest

from support.lock_servers import LockServer
from support.scripts import run_script

FORKS = """
import os, sys, threading
from taskguard.locks import Held, Hold
from taskguard.model.lease import new_owner
from taskguard.settings import make_locks

locks, mine, renewals, stop = make_locks(sys.argv[1]), new_owner("parent"), [], []
locks.acquire(("watched",), mine, ttl_s=30, with_fence=False, wait_s=0)

def renew():
    while not stop:
        renewals.append(locks.renew([Hold(("watched",), mine, 30.0)])[0])

def work():
    key, owner = ("child's",), new_owner("child")
    for _ in range(3):
        locks.acquire(key, owner, ttl_s=30, with_fence=False, wait_s=0)
        answer = locks.acquire(key, new_owner("x"), ttl_s=30, with_fence=False, wait_s=0)
        assert isinstance(answer, Held) and answer.owner == owner, answer
        assert locks.release(key, owner)
    answer = locks.acquire(("watched",), new_owner(), ttl_s=30, with_fence=False, wait_s=0)
    assert isinstance(answer, Held) and answer.owner == mine, answer
    locks.close()

threads = [threading.Thread(target=renew) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
stop.append("now")
for thread in threads:
    thread.join()
assert set(renewals) == {"renewed"}, set(renewals)
assert locks.release(("watched",), mine)
print("ok")
"""

GREENLETS = """
from gevent import monkey; monkey.patch_all()
import sys, gevent
from taskguard import native
from taskguard.locks import Granted, Hold
from taskguard.model.lease import new_owner
from taskguard.settings import make_locks

locks = make_locks(sys.argv[1])
inside, count, turns, renewals, stop = [0], 10, [], [], []
mine = new_owner("watched")
locks.acquire(("watched",), mine, ttl_s=30, with_fence=False, wait_s=0)

def watchdog():  # on a native thread, as the real one
    while not stop:
        renewals.append(locks.renew([Hold(("watched",), mine, 30.0)])[0])
    stop.append("ended")

def work():
    owner = new_owner("m")
    while True:
        answer = locks.acquire(("k",), owner, ttl_s=30, with_fence=locks.traits.tokens, wait_s=10)
        if isinstance(answer, Granted):
            break
        locks.wait(answer.key, owner, timeout_s=10)
    inside[0] += 1
    gevent.sleep(0.002)
    assert inside[0] == 1
    inside[0] -= 1
    assert locks.release(("k",), owner)
    turns.append(answer.fence if locks.traits.tokens else owner)

native.start_thread(watchdog)
gevent.joinall([gevent.spawn(work) for _ in range(count)], raise_error=True)
stop.append("now")
while stop[-1] != "ended":
    gevent.sleep(0.01)
assert len(set(turns)) == count, turns
assert len(renewals) > 5 and set(renewals) == {"renewed"}, renewals[:10]
print("ok")
"""


# A table and advisory locks have tests of their own: each thread that renews needs its own key.
# Locks on ZooKeeper refuse to run under gevent.
WITH_GREENLETS = ["valkey", "sentinel", "cluster", "redlock", "etcd", "consul"]


@pytest.mark.parametrize("server", [*WITH_GREENLETS, "zookeeper"], indirect=True)
def test_forks(server: LockServer) -> None:
    """Children use their own connections and sessions while threads of their parent renew. A child
    that closes its provider ends none of its parent's."""
    assert run_script(FORKS, str(server.url)) == "ok"


@pytest.mark.parametrize("server", WITH_GREENLETS, indirect=True)
def test_greenlets_and_a_native_thread(server: LockServer) -> None:
    """Greenlets share no connection with a native thread, and one that waits lets others run."""
    assert run_script(GREENLETS, str(server.url)) == "ok"
