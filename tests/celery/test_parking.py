"""`busy="park"` with real workers: messages wait in the ledger, and come in their order."""

from __future__ import annotations

from typing import Any


def order_of(shop: Any, name: str) -> list[int]:
    """In which order bodies began."""
    items = [step.item.split() for step in shop.steps("began")]
    return [int(number) for key, number in items if key == name]


def overlaps(shop: Any, name: str) -> int:
    """How many bodies began while another one of the key was at work."""
    moments = [
        (step.at_s, what)
        for what, name_of_step in ((1, "began"), (-1, "ended"))
        for step in shop.steps(name_of_step)
        if step.item.split()[0] == name
    ]
    inside, found = 0, 0
    for _, what in sorted(moments):
        found += what == 1 and inside > 0
        inside += what
    return found


def test_messages_of_two_keys_run_in_order(shop: Any) -> None:
    """One at a time for each key, each once, in the order in which they came; nothing is left."""
    results = [
        shop.tasks.queue_up.delay(name, number, 0.005) for number in range(40) for name in "ab"
    ]
    with shop.worker(concurrency=2), shop.worker(concurrency=2):
        assert [each.get(timeout=120) for each in results] == [n for n in range(40) for _ in "ab"]
        shop.wait_for_quiet()
    assert set(shop.effects().values()) == {1}
    assert len(shop.effects()) == 80
    for name in "ab":
        assert overlaps(shop, name) == 0
        found = order_of(shop, name)
        print(name, sum(a > b for a, b in zip(found, found[1:])), found)
    with shop.engine.connect() as db:
        print(
            db.exec_driver_sql(
                "select state, id, task, key from taskguard_work where state <> 'DONE'"
            ).all()
        )

    print(
        *[l for l in shop.logs().splitlines() if "lead" in l or "hutdown" in l or "eader" in l],
        sep="\n",
    )
    assert 0
