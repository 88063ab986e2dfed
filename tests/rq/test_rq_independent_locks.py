"""RQ's work horses, whose locks a majority of independent servers grants; one server is frozen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.independent import Independent, independent
from support.invoices import charge
from support.needs import need
from support.office import Office
from support.waiting import wait_until
from taskguard_sandbox.servers import Valkey

# A horse that waited for the frozen server, in a call or at its end, would take this long.
SILENCE_S = 60


@pytest.fixture
def five() -> Iterator[Independent]:
    need(Valkey)
    with independent(5) as made:
        yield made


@pytest.fixture
def spread(
    five: Independent, valkey: Any, redis_url: str, pg_url: str, tmp_path: Path
) -> Iterator[Office]:
    options = f"?socket_timeout={SILENCE_S}&socket_connect_timeout={SILENCE_S}"
    made = Office(
        broker=valkey.url_of(2), locks=five.url + options, database=pg_url, folder=tmp_path
    )
    yield made
    made.close()


def test_a_frozen_server_delays_no_work_horse(five: Independent, spread: Any) -> None:
    """Each horse connects for itself, charges its invoice once, ends at once, leaves no lock."""
    spread.worker()
    five.servers[2].pause()
    began_s = time.monotonic()
    jobs = [spread.queue.enqueue(charge, number) for number in (1, 2, 1, 3)]
    spread.wait_for(
        lambda: all(job.get_status(refresh=True) == "finished" for job in jobs), "all finished"
    )
    assert time.monotonic() - began_s < SILENCE_S
    assert spread.effects() == Counter({"1": 1, "2": 1, "3": 1})
    five.servers[2].resume()
    wait_until(lambda: five.owners("invoice:1") == [None] * 5)
    assert "gave an answer that counts" not in spread.logs()
