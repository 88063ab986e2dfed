"""A short storm over taskguard keeps every invariant. Over unguarded tasks it causes double
effects."""

from __future__ import annotations

import pytest

from storm.faults import FAULTS
from storm.invariants import Findings, double_and_lost
from storm.scenario import OURS, draw_fault, draw_item, run
from support.exploration import Exploration
from support.needs import need
from taskguard_sandbox.servers import Postgres, Valkey


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_taskguard_keeps_every_invariant(exploration: Exploration) -> None:
    """Celery and RQ run until takeovers, refused commits and lost COMMIT replies have occurred."""
    need(Valkey)
    need(Postgres)

    def enough(world: object) -> bool:
        return bool(
            world.commits_lost and world.said("stale_refused") and world.said("takeover")  # type: ignore[attr-defined]
        )

    seconds = exploration.amount(20, 300)
    record = run(OURS, seconds=seconds, seed=exploration.seed, say=print, until=enough)
    findings = Findings(record)
    print(findings.seen())
    assert findings.wrong == []
    assert double_and_lost(record) == (0, 0)
    assert any(item.by_rq for item in record.items)
    assert len(record.effects) >= len(record.items) > 20


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_without_a_guard_the_same_storm_is_seen_to_double_effects(
    exploration: Exploration,
) -> None:
    """The storm detects double effects of unguarded tasks."""
    need(Valkey)
    need(Postgres)
    seed = exploration.seed
    record = run(
        "bare", seconds=5, seed=seed, say=print, until=lambda world: world.double_effects() > 0
    )
    assert double_and_lost(record)[0] > 0


def test_a_seed_draws_the_same_storm_again_and_another_one_another() -> None:
    """Items, duplicates and faults depend on the seed and their number only, so all libraries get
    the same ones."""

    def storm(seed: int) -> list[object]:
        items = [draw_item(seed, number) for number in range(50)]
        return [*items, *(draw_fault(seed, number)[:2] for number in range(50))]

    assert storm(7) == storm(7) != storm(8)
    drawn = [draw_item(7, number) for number in range(200)]
    assert {item.kind for item in drawn} == {"plain", "long", "atomic", "halves", "fails"}
    assert {len(item.again) for item in drawn} >= {0, 1, 2, 3}
    assert len({draw_fault(7, number)[0] for number in range(200)}) == len(FAULTS)
