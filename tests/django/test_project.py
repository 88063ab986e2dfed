"""A Django project with its settings module and Celery app, as `manage.py` and commands see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import patience_s

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


def test_manage_py_taskguard_is_the_command(project: Path) -> None:
    """`manage.py taskguard` and `taskguard` with DJANGO_SETTINGS_MODULE print the same, and exit
    with the same statuses."""
    manage = [sys.executable, "-m", "django"]
    settings = {"DJANGO_SETTINGS_MODULE": "shop_settings"}
    run(project, "-m", "django", "migrate", "--settings", "shop_settings")
    run(project, "writes.py")
    found = {}
    for name, command in {
        "manage.py": [*manage, "taskguard"],
        "taskguard": [sys.executable, "-m", "taskguard"],
    }.items():
        for words in (["work", "list", "--overdue"], ["explain", "nothing:1"], ["keys", "x"]):
            done = subprocess.run(
                [*command, *words],
                cwd=project,
                env={**os.environ, **settings, "PYTHONPATH": str(project)},
                capture_output=True,
                text=True,
                timeout=patience_s(60),
                check=False,
            )
            found[name, words[0]] = done.returncode, done.stdout
    for word, status in {"work": 0, "explain": 3, "keys": 2}.items():
        assert found["manage.py", word] == found["taskguard", word]
        assert found["manage.py", word][0] == status
    assert "\tshop.ship order:7\t" in found["manage.py", "work"][1]
