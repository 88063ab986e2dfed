"""`python -m benchmarks [name …] [--quick] [--beside-load]`."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from benchmarks.measure import CONSOLE

ALL = (
    "startup",
    "route",
    "locks",
    "waiters",
    "coroutines",
    "cluster",
    "etcd",
    "zookeeper",
    "guarded",
    "drivers",
    "leases",
    "drain",
    "contention",
    "mixed",
    "scale",
    "sweep",
    "idle",
    "counts",
    "operations",
)
BESIDE_LOAD = ("locks", "guarded", "drain")
PACKAGES = (
    "celery", "kombu", "rq", "redis", "psycopg", "pymysql", "sqlalchemy",
    "procrastinate", "python-redis-lock", "mithril-locks", "fencekit", "pottery", "redlock-py",
    "etcd3gw", "kazoo",
)  # fmt: skip


def main() -> None:
    """Run what was named, by default everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ALL, []], help="by default all of them")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; rough figures")
    parser.add_argument(
        "--beside-load",
        action="store_true",
        help="measure locks, guarded and drain once more beside a busy process on each processor",
    )
    parser.add_argument("--processes", type=int, help="counts: number of processes")
    parser.add_argument("--rate", type=int, help="counts: outcomes per second and process")
    parser.add_argument("--seconds", type=float, help="counts: duration")
    options = parser.parse_args()
    CONSOLE.print(
        f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} CPUs; "
        + ", ".join(filter(None, map(_version, PACKAGES)))
    )
    CONSOLE.print()
    for name in options.names or ALL:
        more = {"beside_load": True} if options.beside_load and name in BESIDE_LOAD else {}
        if name == "counts":
            given = {each: getattr(options, each) for each in ("processes", "rate", "seconds")}
            more = {each: number for each, number in given.items() if number is not None}
        importlib.import_module(f"benchmarks.{name}").main(quick=options.quick, **more)


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
