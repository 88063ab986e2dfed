"""A chord whose first member's message is delivered twice; prints what its body returned.

python -m support.django_chord BACKEND FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import django
from celery import Celery, chord
from django.conf import settings
from django.core.management import call_command

import taskguard_celery
from support.waiting import patience_s
from taskguard.ledger.sql import SqlLedger
from taskguard_celery import guarded_task

BACKEND, FOLDER = sys.argv[1:]
settings.configure(
    INSTALLED_APPS=["django_celery_results"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{FOLDER}/results"}},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    SECRET_KEY="for tests",
    USE_TZ=True,
)
django.setup()
call_command("migrate", verbosity=0)

app = Celery("shop", broker="memory://", backend=BACKEND)
ledger = SqlLedger(f"sqlite:///{FOLDER}/ledger")
ledger.create_schema()
taskguard_celery.configure(app, locks="memory://", ledger=ledger)


@app.task
@guarded_task(key="add:<x>", once_per="message")
def add(x: int) -> int:
    return x


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


app.conf.worker_redirect_stdouts = False
result = chord([add.s(1), add.s(2), add.s(3)])(total.s())
with app.connection_for_write() as connection:
    channel = connection.default_channel
    messages = [channel._get("celery") for _ in range(3)]
    # Twice at first, and once more when the chord has ended.
    for message in (messages[0], *messages, messages[1]):
        channel._put("celery", message)


def tell() -> None:
    try:
        print(result.get(timeout=patience_s()), result.state, flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


threading.Thread(target=tell).start()
app.worker_main(["worker", "--pool=solo", "--loglevel=WARNING"])
