"""Faults, drawn from a seed: kill, freeze, empty, cut off, restart, or lose a reply.

A fault that takes time (a pause, a server that is down) begins here and is ended by `World.later`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import redis

from storm.settings import TTL_S
from support.proxy import Mode

if TYPE_CHECKING:
    from storm.scenario import World

__all__ = ["FAULTS", "Fault"]

# Applies a fault to the world, and returns its description, or "" if it had no target.
Fault = Callable[["World", random.Random], str]


def child_killed(world: World, rng: random.Random) -> str:
    """Kill a pool child or a work horse, most often in a body."""
    pid = world.victim(rng)
    return f"{pid}" if pid and _signal(pid, signal.SIGKILL) else ""


def child_paused(world: World, rng: random.Random) -> str:
    """Pause a child for longer than its lease, most often in a body."""
    pid = world.victim(rng)
    if not pid or pid in world.paused or not _signal(pid, signal.SIGSTOP):
        return ""
    pause_s = TTL_S * rng.uniform(1.2, 3.0)
    world.paused.add(pid)

    def go_on() -> None:
        world.paused.discard(pid)
        _signal(pid, signal.SIGCONT)

    world.later(pause_s, go_on)
    return f"{pid} for {pause_s:.1f} s"


def worker_killed(world: World, rng: random.Random) -> str:
    """Kill a Celery worker with all its children. A new one starts a second later."""
    worker = world.celery_worker(rng)
    if worker is None:
        return ""
    worker.kill()
    world.later(1.0, lambda: world.in_background(worker.start))
    return "and its children"


def worker_frozen(world: World, rng: random.Random) -> str:
    """Freeze the whole process tree for longer than its leases."""
    worker = world.celery_worker(rng)
    if worker is None:
        return ""
    worker.pause()
    world.later(TTL_S * rng.uniform(1.2, 2.0), worker.resume)
    return "and its children"


def locks_emptied(world: World, rng: random.Random) -> str:
    """FLUSHALL."""
    del rng
    return "FLUSHALL" if _answered(world.locks_client.flushall) else ""


def scripts_emptied(world: World, rng: random.Random) -> str:
    """SCRIPT FLUSH."""
    del rng
    return "SCRIPT FLUSH" if _answered(world.locks_client.script_flush) else ""


def locks_frozen(world: World, rng: random.Random) -> str:
    """SIGSTOP on the lock server."""
    world.locks.pause()
    world.later(rng.uniform(0.3, 2.0), world.locks.resume)
    return "SIGSTOP"


def locks_killed(world: World, rng: random.Random) -> str:
    """Kill the lock server, which comes back empty."""
    if not world.locks.running:
        return ""
    world.locks.kill()
    world.later(rng.uniform(0.1, 1.5), lambda: world.in_background(world.locks.start))
    return "SIGKILL, back empty"


def locks_reply_lost(world: World, rng: random.Random) -> str:
    """Lose the reply to one script that ran."""
    then = rng.choice([Mode.SWALLOW, Mode.CUT])
    world.locks_proxy.lose_reply_to(b"EVALSHA", then=then)
    return then.value


def locks_cut(world: World, rng: random.Random) -> str:
    """Cut every connection to the lock server."""
    del rng
    world.locks_proxy.cut()
    return "all connections"


def commit_reply_lost(world: World, rng: random.Random) -> str:
    """Lose the reply to a COMMIT that the database has done."""
    world.commits_lost += not world.database_proxy.armed
    world.database_proxy.lose_reply_to(
        b"COMMIT", then=rng.choice([Mode.CUT, Mode.CUT, Mode.SWALLOW])
    )
    return "COMMIT"


def claim_reply_lost(world: World, rng: random.Random) -> str:
    """Lose the reply to a statement that psycopg has prepared: a claim, a renewal, a completion."""
    world.database_proxy.lose_reply_to(b"_pg3_", then=Mode.CUT)
    del rng
    return "a statement"


def database_cut(world: World, rng: random.Random) -> str:
    """Cut every connection to the database."""
    del rng
    world.database_proxy.cut()
    return "all connections"


def backend_terminated(world: World, rng: random.Random) -> str:
    """pg_terminate_backend on one."""
    del rng
    return world.terminate_a_backend()


def database_restarted(world: World, rng: random.Random) -> str:
    """Restart the database as an operator does, or by SIGKILL and recovery."""
    if not world.postgres.running:
        return ""
    how = rng.choice([world.postgres.halt, world.postgres.kill])
    how()
    world.later(0.5, lambda: world.in_background(world.postgres.start))
    return "SIGKILL, recovery" if how == world.postgres.kill else "restart"


FAULTS: dict[Fault, float] = {
    child_killed: 6,
    child_paused: 6,
    worker_killed: 0.5,
    worker_frozen: 1,
    locks_emptied: 2,
    scripts_emptied: 1,
    locks_frozen: 1,
    locks_killed: 1,
    locks_reply_lost: 3,
    locks_cut: 1,
    commit_reply_lost: 4,
    claim_reply_lost: 3,
    database_cut: 1,
    backend_terminated: 2,
    database_restarted: 0.5,
}


def _answered(ask: Callable[[], object]) -> bool:
    """Return whether the lock server, which may be down or frozen, has done it."""
    with contextlib.suppress(redis.RedisError):
        ask()
        return True
    return False


def _signal(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(pid, number)
        return True
    return False
