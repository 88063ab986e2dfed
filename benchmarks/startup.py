"""What `import taskguard` costs, and what it leaves for later."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.measure import CONSOLE

HEAVY = ("sqlalchemy", "redis", "celery", "rq")
CODE = """
import sys, time
began = time.perf_counter()
import taskguard
took = time.perf_counter() - began
print(took * 1000, ",".join(name for name in {heavy!r} if name in sys.modules))
"""


def main(*, quick: bool) -> None:
    """Print the median of fresh interpreters, beside redis-py's own import."""
    ours, loaded = _import(CODE.format(heavy=HEAVY), 5 if quick else 15)
    peer, _ = _import(CODE.format(heavy=()).replace("import taskguard", "import redis"), 5)
    CONSOLE.print("[bold]Import[/bold]")
    CONSOLE.print(f"  import taskguard: {ours:.0f} ms ({ours / peer:.2f} x import redis)")
    CONSOLE.print(f"  of {', '.join(HEAVY)} it loads: {loaded or 'none'}")
    CONSOLE.print()


def _import(code: str, times: int) -> tuple[float, str]:
    samples, loaded = [], ""
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        milliseconds, _, loaded = done.stdout.strip().partition(" ")
        samples.append(float(milliseconds))
    return statistics.median(samples), loaded
