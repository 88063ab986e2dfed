from typing import Any
import time
import pytest


@pytest.mark.parametrize("busy", ["queue_up", "put_off", "blocking", "bare"])
def test_hot(make_shop: Any, busy: str) -> None:
    shop = make_shop()
    task = getattr(shop.tasks, busy)
    for number in range(200):
        for name in "ab":
            task.delay(name, number, 0.005)
    with shop.worker(concurrency=2), shop.worker(concurrency=2):
        shop.wait_for_effects(400, timeout_s=120)
        shop.wait_for_quiet()
    b = shop.steps("began")
    e = shop.steps("ended")
    lats = []
    for name in "ab":
        bb = sorted(s.at_s for s in b if s.item.split()[0] == name)
        ee = sorted(s.at_s for s in e if s.item.split()[0] == name)
        lats += [y - x for x, y in zip(ee, bb[1:])]
    lats.sort()
    inv = 0
    for name in "ab":
        f = [int(s.item.split()[1]) for s in b if s.item.split()[0] == name]
        inv += sum(x > y for x, y in zip(f, f[1:]))
    print(
        f"\n##{busy}: {e[-1].at_s - b[0].at_s:.2f} s; handoff p50 {lats[len(lats) // 2] * 1e3:.1f} p99 {lats[int(len(lats) * 0.99)] * 1e3:.1f} max {lats[-1] * 1e3:.1f} ms; inversions {inv}"
    )
