"""Files that are imported once, from where the last process stopped: `python measurements.py`.

RQ, and SQLite for everything else. The first part is the code of a project.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from sqlalchemy import text

from taskguard import Guard
from taskguard_rq import guarded_job

# RQ sets logging up for itself alone; this shows what taskguard tells at INFO.
logging.basicConfig(level=logging.INFO, format="%(message)s")

LINES_AT_A_TIME = 2


# The URLs come from TASKGUARD_LOCKS_URL and TASKGUARD_LEDGER_URL=sqlite:////var/lib/data.sqlite.
@guarded_job(key="file:<name>", ttl_s=5)
def load(name: str, guard: Guard) -> int:
    """Put the lines of a file into the database, some at a time."""
    lines = (Path(os.environ["MEASUREMENTS"]) / name).read_text().split()
    done = guard.progress or 0  # where the last holder stopped
    print(f"file:{name} is read from line {done + 1} by process {os.getpid()}")
    insert = text("insert into measurements (file, value) values (:file, :value)")

    while len(lines) - done > LINES_AT_A_TIME:
        part = [{"file": name, "value": line} for line in lines[done : done + LINES_AT_A_TIME]]
        # Convert them before the transaction: SQLite has one writer, others wait for it.
        time.sleep(float(os.environ.get("MEASUREMENTS_SECONDS", "0.1")))
        done += LINES_AT_A_TIME
        with guard.checkpoint(done) as db:  # these rows and "so far" are committed together
            db.execute(insert, part)

    with guard.transaction() as db:  # the last rows and "file:a.txt is DONE", too
        db.execute(insert, [{"file": name, "value": line} for line in lines[done:]])
        guard.result = len(lines)
    return len(lines)


# -- From here on: a private Redis, workers, and jobs that run more than once. ---------------------

FILES = {"a.txt": 9, "b.txt": 5}


def main() -> int:
    """Enqueue every file twice. Return 0 if each of its lines is in the database once."""
    import argparse
    import tempfile

    import redis
    import sqlalchemy as sa
    from rq import Queue, Retry

    from taskguard.cli import main as taskguard
    from taskguard_sandbox.examples import rq_answers, started
    from taskguard_sandbox.servers import Valkey
    from taskguard_sandbox.workers import RQWorker

    parser = argparse.ArgumentParser(description="Every file comes twice and is imported once.")
    parser.add_argument("--seconds", default="0.1", help="how long two lines take")
    os.environ["MEASUREMENTS_SECONDS"] = parser.parse_args().seconds

    with Valkey() as valkey, tempfile.TemporaryDirectory() as folder:
        for name, count in FILES.items():
            Path(folder, name).write_text("\n".join(f"{name}-{n}" for n in range(count)))
        os.environ.update(
            MEASUREMENTS=folder,
            TASKGUARD_LOCKS_URL=valkey.url_of(2),
            TASKGUARD_LEDGER_URL=f"sqlite:///{folder}/data.sqlite",
        )
        taskguard(["ledger", "create"])
        database = sa.create_engine(os.environ["TASKGUARD_LEDGER_URL"])
        with database.begin() as db:  # no unique index: a second row would be seen
            db.execute(text("create table measurements (file text, value text)"))

        queue = Queue("files", connection=redis.Redis.from_url(valkey.url))
        here = Path(__file__).parent
        # `rq worker --worker-class taskguard_rq.GuardedWorker`
        two = [RQWorker("files", url=valkey.url, python_path=here) for _ in range(2)]
        again = {"retry": Retry(max=3)}  # RQ runs the job of a killed work horse only then
        with started(two) as workers:
            jobs = [
                queue.enqueue("measurements.load", name, **again) for name in FILES for _ in "ab"
            ]
            answers = rq_answers(jobs, workers, about="file:")
        queue.connection.close()

        with database.connect() as db:
            rows = db.execute(
                text("select file, count(*), count(distinct value) from measurements group by 1")
            )
            lines = {file: (count, distinct) for file, count, distinct in rows}
        database.dispose()

    print("\nanswers:", answers)
    print("lines:", {name: count for name, (count, _) in sorted(lines.items())})
    right = lines == {name: (count, count) for name, count in FILES.items()}
    return 0 if right and answers == [9, 9, 5, 5] else 1


if __name__ == "__main__":
    raise SystemExit(main())
