"""Several `rq cron`: a tick that two of them enqueued runs once; with a leader one enqueues."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import cron_scheduler_registry

from support import clock_shim
from support.families import Family
from support.office import HERE, Office
from support.waiting import patience_s, wait_until
from taskguard_rq.cron import LeaderCronScheduler
from taskguard_sandbox.servers import free_port

CONFIG = "support.cron_entries"
# Long enough that a leader keeps its lease while the machine pauses.
TTL_S = 6.0


class Cron:
    """A scheduler of cron jobs in a process of its own."""

    def __init__(
        self,
        office: Office,
        number: int,
        *module: str,
        config: str = CONFIG,
        **environment: str,
    ) -> None:
        self.log: Path = office.folder / f"worker-cron-{number}.log"
        self.family = Family(
            [sys.executable, "-m", *module, "cron", "-u", office.broker, "-l", "DEBUG", config],
            environment={
                **os.environ,
                **office.environment,
                "PYTHONPATH": str(HERE),
                "TASKGUARD_CRON_TTL_S": str(TTL_S),
                "TMPDIR": str(office.folder),
                "PYTHONFAULTHANDLER": "1",
                **environment,
            },
            log=self.log,
            cwd=HERE.parent,
        )
        office._workers.append(self.family)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def has_begun(self) -> bool:
        """Return True if the process is in RQ's loop, where it handles its signals."""
        return "heartbeat sent" in self.text()

    def enqueued(self) -> int:
        """Return the number of jobs that its log says it has enqueued."""
        return self.text().count("Enqueued job")

    def goes_on(self) -> None:
        """Wait until the cron enqueues again."""
        before = self.enqueued()
        wait_until(
            lambda: self.enqueued() > before + 1,
            message=lambda: self.text()[-3000:],
        )

    def signal(self, number: int) -> None:
        os.kill(self.family.process.pid, number)

    def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return self.family.process.wait(patience_s())


def led_pair(office: Office, number: int = 0) -> tuple[Cron, Cron]:
    """Return the leader and the follower, both of which have begun."""
    crons = [Cron(office, number + each, "taskguard_rq") for each in range(2)]
    wait_until(
        lambda: all(each.has_begun() for each in crons),
        message=lambda: "\n".join(each.text() for each in crons),
    )
    leader = wait_until(
        lambda: next((each for each in crons if each.enqueued()), None),
        message=lambda: "\n".join(each.text() for each in crons),
    )
    return leader, next(each for each in crons if each is not leader)


def follows_s(cron: Cron, since_s: float) -> float:
    wait_until(cron.enqueued, interval_s=0.005, message=lambda: cron.text()[-3000:])
    return time.monotonic() - since_s


def test_a_tick_that_two_stock_crons_enqueued_runs_once(office: Any) -> None:
    """A tick that two schedulers enqueued runs once with a guard, and twice without one. Their
    clocks differ."""
    missing = clock_shim.unavailable()
    if missing:
        pytest.skip(missing)
    with clock_shim.server_clock() as clock:
        clock.jump(-2.3)
        Cron(office, 0, "rq.cli")
        Cron(office, 1, "rq.cli", **clock.environment)
        office.worker("taskguard_rq.GuardedSimpleWorker")

        def came() -> Counter[str]:
            return Counter(item for item, _ in office.steps("came"))

        office.wait_for(lambda: list(came().values()).count(2) >= 4, "ticks of both")
    ran = office.effects()
    assert len(ran) >= 3
    assert set(ran.values()) == {1}
    assert max(came().values()) == 2
    assert all(item.startswith("support.invoices.tick@invoices@") for item in ran)


@pytest.mark.once
def test_a_cron_that_is_frozen_neither_dies_nor_enqueues_once_it_wakes(office: Any) -> None:
    """A frozen leader that wakes is a candidate again. SIGTERM ends a leader and a candidate with
    status 0."""
    leader, other = led_pair(office)
    leader.signal(signal.SIGSTOP)
    follows_s(other, time.monotonic())
    before = leader.enqueued()
    leader.signal(signal.SIGCONT)
    wait_until(lambda: "lost after" in leader.text(), message=leader.text)
    other.goes_on()
    # The round that it was in when it was frozen, at most.
    assert leader.enqueued() - before <= 2
    assert other.terminate() == 0
    leader.goes_on()
    assert leader.terminate() == 0


def test_a_cron_that_campaigns_ends_by_sigterm(office: Any) -> None:
    """SIGTERM ends a candidate with status 0, and the leader goes on."""
    leader, other = led_pair(office)
    assert other.terminate() == 0
    leader.goes_on()
    assert leader.terminate() == 0


def test_a_cron_that_is_stopped_before_it_has_begun(office: Any) -> None:
    """SIGTERM ends a process that is registering at a silent broker. It logs no error, and leaves
    nothing in RQ's registry."""
    paused = {"config": "support.cron_paused", "PAUSED_BROKER": office.broker}
    cron = Cron(office, 0, "taskguard_rq", **paused)
    wait_until(lambda: "registering birth" in cron.text(), message=cron.text)
    assert cron.terminate() == 0, cron.text()
    assert not cron.has_begun()
    assert "Traceback" not in cron.text()
    assert cron_scheduler_registry.get_keys(office.connection) == []


@pytest.mark.parametrize("redis_is", ["emptied", "away"])
def test_a_cron_whose_end_cannot_be_registered(valkey: Any, redis_is: str) -> None:
    """If Redis is empty or down, `register_death()` raises no error."""
    port = valkey.port if redis_is == "emptied" else free_port()
    with redis.Redis(port=port) as client:
        LeaderCronScheduler(connection=client).register_death()
