"""Writes that no transaction reaches, by holders that die or sleep before them: `elsewhere.py`.

The first part is the code of a project. The second part runs it here.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from http.client import HTTPMessage
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import taskguard
from taskguard import Guard
from taskguard.errors import StaleTokenError

SHOP = os.environ.get("SHOP_URL", "")
BUCKET = os.environ.get("BUCKET_URL", "")
tg = taskguard.connect(locks=None, ledger=os.environ.get("TASKGUARD_LEDGER_URL", "sqlite://"))
patiently = {"ttl_s": 2, "busy": "wait", "wait_s": 60}


@tg.guarded(key="charge:<order_id>", **patiently)
def charge(order_id: int, guard: Guard) -> str:
    """The body may run twice; the key is the same each time, and so is the answer."""
    headers = {"Idempotency-Key": guard.idempotency_key}
    _, _, body = ask("POST", f"{SHOP}/charges", {"order": order_id, "cents": 990}, headers)
    an_accident_may_happen_here()
    return json.loads(body)["charge"]


@tg.guarded(key="status:<order_id>", **patiently)
def set_status(order_id: int, guard: Guard) -> str:
    """The service keeps the newest token of each resource, and refuses older ones."""
    an_accident_may_happen_here()
    value = f"shipped by process {os.getpid()}"
    headers = {"X-Fencing-Token": str(guard.fence)}
    status, found, _ = ask("PUT", f"{SHOP}/orders/{order_id}", value, headers)
    if status == 412:
        raise stale(guard, int(found["X-Fencing-Token"]))
    return value


@tg.guarded(key="label:<order_id>", **patiently)
def print_label(order_id: int, guard: Guard) -> str:
    """The object store compares ETags. The object's metadata has the fence of its last writer."""
    value = f"label by process {os.getpid()}"
    put_object(f"{BUCKET}/labels/{order_id}.json", value, guard)
    return value


def put_object(url: str, value: str, guard: Guard) -> None:
    """Write an object, but not over a newer holder's."""
    # The content has the token, too. S3 computes the ETag from the content alone. So if a newer
    # holder writes the same value without a token, the ETag is still the one that we have read.
    content = {"fence": guard.fence, "value": value}
    while True:
        status, found, _ = ask("GET", url)
        newest = int(found["x-amz-meta-fence"]) if status == 200 else 0
        if newest > guard.fence:
            raise stale(guard, newest)
        an_accident_may_happen_here()
        unchanged = {"If-Match": found["ETag"]} if status == 200 else {"If-None-Match": "*"}
        metadata = {"x-amz-meta-fence": str(guard.fence)}
        status, _, _ = ask("PUT", url, content, unchanged | metadata)
        if status == 200:
            return
        # 412, 409 or 404: the object has changed since we read it. Read it again.


def stale(guard: Guard, newer: int) -> StaleTokenError:
    """taskguard then answers from the record, or puts the delivery off."""
    print(f"{guard.key}: process {os.getpid()} wakes up and is refused")
    return StaleTokenError(
        f"A newer holder of {guard.key} has written: {newer} > {guard.fence}.",
        key=guard.key,
        fence=guard.fence,
        newer_fence=newer,
    )


def ask(
    method: str, url: str, value: object = None, headers: dict[str, str] | None = None
) -> tuple[int, HTTPMessage, bytes]:
    """Status, headers and body; with a refusal that we know how to handle as well."""
    body = None if value is None else json.dumps(value).encode()
    try:
        with urlopen(Request(url, body, headers or {}, method=method), timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except HTTPError as refusal:
        with refusal:
            if refusal.code not in (404, 409, 412):
                raise
            return refusal.code, refusal.headers, refusal.read()


# -- From here on: two services, and for each task two processes, one of which has an accident. ----

ACCIDENTS = {"charge": signal.SIGKILL, "set_status": signal.SIGSTOP, "print_label": signal.SIGSTOP}
ORDER = 7


def an_accident_may_happen_here() -> None:
    """The process is killed, or stopped for longer than its lease."""
    accident = os.environ.pop("ACCIDENT", None)
    if accident:
        wait_for_renewal()
        os.kill(os.getpid(), int(accident))


def wait_for_renewal() -> None:
    """Wait until the lease was renewed: a process stopped during a write to SQLite blocks all."""
    import sqlite3

    file = os.environ["TASKGUARD_LEDGER_URL"].removeprefix("sqlite:///")
    with closing(sqlite3.connect(file)) as db:
        db.execute("begin immediate")


def main() -> int:
    """0 if each place has what the second process wrote, and the customer was charged once."""
    import tempfile
    from pathlib import Path

    from services import Bucket, Shop, serve

    from taskguard.cli import main as taskguard_command

    shop, bucket = Shop(), Bucket()
    with tempfile.TemporaryDirectory() as folder, serve(shop) as a, serve(bucket) as b:
        ledger = f"sqlite:///{Path(folder) / 'ledger.sqlite'}"
        os.environ.update(SHOP_URL=a, BUCKET_URL=b, TASKGUARD_LEDGER_URL=ledger)
        taskguard_command(["ledger", "create"])
        answers = {task: run_twice(task, accident) for task, accident in ACCIDENTS.items()}

    _, status = shop.resources[f"/orders/{ORDER}"]
    label, _ = bucket.objects[f"/labels/{ORDER}.json"]
    written = {"set_status": json.loads(status), "print_label": json.loads(label)["value"]}
    right = written == {task: answers[task] for task in written}
    print(f"\ncharge requests: {shop.requests}, charges: {len(shop.charges)}")
    print("status and label are the second process's:", right)
    return 0 if right and len(shop.charges) == 1 else 1


def run_twice(task: str, accident: signal.Signals) -> str:
    """The second process's answer; the first has its accident before, and wakes up afterwards."""
    import subprocess
    import sys

    def start(**more: str) -> subprocess.Popen:
        command = [sys.executable, __file__, task]
        return subprocess.Popen(
            command, env={**os.environ, **more}, stdout=subprocess.PIPE, text=True
        )

    with start(ACCIDENT=str(int(accident))) as first:
        try:
            os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            print(f"{task}: process {first.pid} gets {accident.name}")
            with start() as second:
                said, _ = second.communicate(timeout=60)
            answer = said.splitlines()[-1]
            print(f"{task}: process {second.pid} takes over: {answer}")
            first.send_signal(signal.SIGCONT)
            late, _ = first.communicate(timeout=60)
            if accident is not signal.SIGKILL:
                refusal, late_answer = late.splitlines()
                print(refusal)
                assert late_answer == answer, "the first process is answered from the record"
        finally:
            first.kill()
    return answer


if __name__ == "__main__":
    import sys

    if len(sys.argv) == 1:
        raise SystemExit(main())
    print({"charge": charge, "set_status": set_status, "print_label": print_label}[sys.argv[1]](7))
