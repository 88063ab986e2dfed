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

# So long the watchdogs of what was measured before may still be there, which would be counted.
_LINGER_S = 3.0


def main(*, quick: bool) -> None:
    """Print what was seen over five renewal intervals."""
    count, ttl_s = (1_000, 3.0) if quick else (LEASES, TTL_S)
    with Valkey() as valkey, Postgres() as postgres:
        ledger = SqlLedger(postgres.create_database("leases"))
        ledger.create_schema()
        lost: list[Event] = []
        renewed: list[int] = []

        def listen(event: Event) -> None:
            if isinstance(event, Lost):
                lost.append(event)
            elif isinstance(event, Renewed):
                renewed.append(event.count)

        tg = taskguard.connect(locks=valkey.url, ledger=ledger, listeners=(listen,))
        trips = _Trips(tg, ledger)
        with contextlib.ExitStack() as stack:
            time.sleep(_LINGER_S)
            threads = threading.active_count()
            process = psutil.Process()
            native = process.num_threads()
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
            standing = sum(lease.remaining_s > 0 for lease in leases)
            CONSOLE.print(f"[bold]{count:,} leases of {ttl_s:g} s, held by one process[/bold]")
            CONSOLE.print(f"  standing after {INTERVALS} renewal intervals: {standing:,}")
            CONSOLE.print(f"  lost: {len(lost)}")
            CONSOLE.print(
                f"  round trips per interval, lock server and ledger: {trips.count / INTERVALS:.0f}"
            )
            CONSOLE.print(f"  renewals: {sum(renewed):,}, {cpu_s / INTERVALS:.2f} s of CPU each")
            CONSOLE.print(
                f"  threads for it: {process.num_threads() - native} "
                f"({threading.active_count() - threads} of Python's own)"
            )
            CONSOLE.print()
        tg.close()


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
