"""A Django project with its settings module and Celery app, as `manage.py` and commands see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from support import claims
from support.waiting import patience_s
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import Claimed

SETTINGS = """
SECRET_KEY = "secret"
INSTALLED_APPS = ["taskguard_django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite"}}
TASKGUARD = {"LOCKS": None}
CELERY_BROKER_URL = "memory://"
"""
APP = """
import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop_settings")
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
"""
WRITES = """
import django
from django.db import transaction

from shop_celery import app
from taskguard_celery import enqueue, guarded_task
from taskguard_django import connection

django.setup()

@app.task
@guarded_task(key="order:<n>")
def ship(n): ...

with transaction.atomic():
    enqueue(ship, (7,), session=connection())
from taskguard_django.models import Work
Work.objects.update(due=1)  # as if the process had died before it was sent
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop_settings.py").write_text(SETTINGS)
    (tmp_path / "shop_celery.py").write_text(APP)
    (tmp_path / "writes.py").write_text(WRITES)
    return tmp_path


def run(project: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])
    given = {name: text for name, text in os.environ.items() if not name.startswith("TASKGUARD_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=project,
        env={**given, "PYTHONPATH": path},
        timeout=patience_s(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_sweep_of_a_projects_celery_app_reads_djangos_settings(project: Path) -> None:
    """`taskguard sweep --celery` and `manage.py` read Django's settings, and need no URL."""
    manage = "-m", "django"
    settings = "--settings", "shop_settings"
    run(project, *manage, "migrate", *settings)
    said = run(project, *manage, "check", "--database", "default", *settings)
    assert "no issues" in said
    assert "No changes" in run(project, *manage, "makemigrations", "--check", *settings)
    run(project, "writes.py")
    assert "sent: 1," in run(project, "-m", "taskguard", "sweep", "--celery", "shop_celery:app")
    assert "sent: 0," in run(project, "-m", "taskguard", "sweep", "--celery", "shop_celery:app")


MANAGE = [sys.executable, "-m", "django", "taskguard"]
COMMAND = [sys.executable, "-m", "taskguard"]
LEDGER = "sqlite:///shop.sqlite"
WAYS: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "manage.py": (MANAGE, [], {"DJANGO_SETTINGS_MODULE": "shop_settings"}),
    "DJANGO_SETTINGS_MODULE": (COMMAND, [], {"DJANGO_SETTINGS_MODULE": "shop_settings"}),
    "--app": (COMMAND, ["--app", "shop_celery:app"], {}),
    "--rq": (
        COMMAND,
        ["--rq", "{redis}"],
        {"TASKGUARD_LEDGER_URL": LEDGER, "TASKGUARD_LOCKS_URL": "memory://"},
    ),
    "--url": (COMMAND, ["--url", LEDGER], {}),
    "the environment": (COMMAND, [], {"TASKGUARD_LEDGER_URL": LEDGER}),
}
"""How a command comes to its ledger: the program, its options and its environment."""
ASKED = {
    "work list --overdue --json": 0,
    "work requeue ship:order:8 --reason bank --json": 0,
    "explain nothing:1 --json": 3,
    "keys resume order:8 --reason bank --json": 1,
    "keys x": 2,
}


def test_each_way_to_a_ledger_gives_the_same_answers(project: Path, redis_url: str) -> None:
    """A question, a change and refusals: the same JSON and exit statuses, whatever names the
    application."""
    run(project, "-m", "django", "migrate", "--settings", "shop_settings")
    run(project, "writes.py")
    base = {name: text for name, text in os.environ.items() if not name.startswith("TASKGUARD_")}
    base.pop("DJANGO_SETTINGS_MODULE", None)
    found: dict[str, list[tuple[int, str]]] = {}
    with closing(SqlLedger(f"sqlite:///{project}/shop.sqlite")) as ledger:
        for way, (command, options, given) in WAYS.items():
            claimed = ledger.claim(claims.request(8))
            assert isinstance(claimed, Claimed), way
            ledger.fail(claimed.claim, "TimeoutError: bank")
            for asked, status in ASKED.items():
                words = [word.replace("ship:", "ship ") for word in asked.split()]
                added = [each.format(redis=redis_url) for each in options]
                done = subprocess.run(
                    [*command, *words, *added],
                    cwd=project,
                    env={**base, **given, "PYTHONPATH": str(project)},
                    capture_output=True,
                    text=True,
                    timeout=patience_s(60),
                    check=False,
                )
                assert done.returncode == status, (way, asked, done.stderr)
                found.setdefault(asked, []).append((done.returncode, done.stdout))
    for asked, answers in found.items():
        assert set(answers) == {answers[0]}, asked
    [overdue] = json.loads(found["work list --overdue --json"][0][1])
    [changed] = json.loads(found["work requeue ship:order:8 --reason bank --json"][0][1])
    assert overdue["id"] == "shop.ship order:7"
    assert (changed["work"], changed["changed"], changed["before"]) == (
        "ship order:8",
        True,
        "FAILED",
    )


def test_the_installed_command_finds_the_project_of_its_folder(project: Path) -> None:
    """Its script does not put the folder into the path, as `python -m` does. Elsewhere it says what
    is wrong, without a traceback."""
    run(project, "-m", "django", "migrate", "--settings", "shop_settings")
    command = [sys.executable, "-P", "-m", "taskguard", "work", "list"]
    base = {name: text for name, text in os.environ.items() if not name.startswith("TASKGUARD_")}
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    said = []
    for folder in (project, elsewhere):
        done = subprocess.run(
            command,
            cwd=folder,
            env={**base, "DJANGO_SETTINGS_MODULE": "shop_settings"},
            capture_output=True,
            text=True,
            timeout=patience_s(60),
            check=False,
        )
        said.append((done.returncode, done.stderr))
    assert said[0] == (0, "taskguard: no work is DEAD\n")
    status, text = said[1]
    assert status == 2
    assert text.startswith("taskguard: DJANGO_SETTINGS_MODULE=shop_settings: No module named")
