"""Ten thousand leases held by one process: what keeping them costs, and whether one is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

import taskguard
from benchmarks.measure import CONSOLE
from taskguard.events import Event, Lost, Renewed
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

LEASES = 10_000
TTL_S = 30.0
INTERVAL_S = TTL_S / 3
INTERVALS = 5

# How long threads of the previous measurement may live and would be counted, in seconds: that of
# the watchdog, and that of the ledger's deadlines.
_LINGER_S = 7.0


def main(*, quick: bool) -> None:
    """Print what was seen over five renewal intervals."""
    count, ttl_s = (300, 9.0) if quick else (LEASES, TTL_S)
    with Valkey() as valkey, Postgres() as postgres:
        ledger = SqlLedger(postgres.create_database("leases"))
        ledger.create_schema()
        lost: list[Event] = []
        renewed: list[int] = []
        threads = _Threads()

        def listen(event: Event) -> None:
            if isinstance(event, Lost):
                lost.append(event)
            elif isinstance(event, Renewed):
                renewed.append(event.count)
                threads.look()  # the thread that renews is there for as long as it renews

        tg = taskguard.connect(locks=valkey.url, ledger=ledger, listeners=(listen,))
        trips = _Trips(tg, ledger)
        with contextlib.ExitStack() as stack:
            time.sleep(_LINGER_S)
            threads.start()
            process = psutil.Process()
            leases = [
                stack.enter_context(tg.lock(f"lease:{number}", ttl_s=ttl_s))
                for number in range(count)
            ]
            trips.count = 0
            renewed.clear()
            busy = process.cpu_times()
            time.sleep(INTERVALS * ttl_s / 3)
            used = process.cpu_times()
            cpu_s = used.user + used.system - busy.user - busy.system
            held = sum(lease.remaining_s > 0 for lease in leases)
            CONSOLE.print(f"[bold]{count:,} leases of {ttl_s:g} s, held by one process[/bold]")
            CONSOLE.print(f"  held after {INTERVALS} renewal intervals: {held:,}")
            CONSOLE.print(f"  lost: {len(lost)}")
            CONSOLE.print(
                f"  round trips per interval, lock server and ledger: {trips.count / INTERVALS:.0f}"
            )
            CONSOLE.print(f"  renewals: {sum(renewed):,}, {cpu_s / INTERVALS:.2f} s of CPU each")
            CONSOLE.print(
                f"  threads for it, at most: {threads.most_native} "
                f"({threads.most_own} of Python's own)"
            )
            CONSOLE.print()
        tg.close()


class _Threads:
    """The highest observed number of threads in addition to those at the start."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.start()

    def start(self) -> None:
        """Count from here."""
        self._native, self._own = self._process.num_threads(), threading.active_count()
        self.most_native = self.most_own = 0

    def look(self) -> None:
        """Count now."""
        self.most_native = max(self.most_native, self._process.num_threads() - self._native)
        self.most_own = max(self.most_own, threading.active_count() - self._own)


class _Trips:
    """Counts calls of the lock server and of the database by the watchdog."""

    def __init__(self, tg: taskguard.TaskGuard, ledger: SqlLedger) -> None:
        self.count = 0
        self._wrap(tg.runner.locks._link, "ask")  # type: ignore[union-attr]  # noqa: SLF001
        self._wrap(ledger._database, "ask")  # noqa: SLF001

    def _wrap(self, owner: Any, name: str) -> None:
        ask: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return ask(*args, **kwargs)

        setattr(owner, name, counted)
