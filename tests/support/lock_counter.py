"""A process that counts up an unprotected counter under a lock.

As a program: `python -m support.lock_counter URL FILE THREADS ROUNDS` prints its turns as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from pytest_taskguard.lock_contract.contention import count_in_threads
from taskguard.settings import make_locks

if __name__ == "__main__":
    url, path, thread_count, round_count = sys.argv[1:]
    locks = make_locks(url)
    assert locks is not None
    with closing(locks):
        done = count_in_threads(
            locks, Path(path), threads=int(thread_count), rounds=int(round_count)
        )
    print(json.dumps([asdict(turn) for turn in done]))
