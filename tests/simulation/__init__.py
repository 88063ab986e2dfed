"""The real runner, watchdog and guard under a seeded scheduler, with a clock and servers of memory.

    make simulate SCHEDULES=1000000 SEED=7

Read next: `scheduler.py` (which process continues), `world.py` (what processes do), `history.py`
(what must hold).
"""
