"""A project's own tests, by `manage.py test` and by pytest-django, on PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.django_shop import database_of
from support.needs import need_redis_in_memory

SETTINGS = """
SECRET_KEY = "secret"
USE_TZ = True  # Django 4.2 warns of projects that do not say
INSTALLED_APPS = ["taskguard_django", "shop"]
DATABASES = {{"default": {database!r}}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TASKGUARD = {{"LOCKS": {locks!r}}}
"""
MODELS = """
from django.db import models

class Order(models.Model):
    parcels = models.IntegerField(default=0)
"""
MIGRATION = """
from django.db import migrations, models

class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel("Order", [
            ("id", models.BigAutoField(primary_key=True)),
            ("parcels", models.IntegerField(default=0)),
        ])
    ]
"""
TASKS = """
import taskguard
from celery import Celery
from django.db.models import F
from taskguard_celery import guarded_task
from taskguard_django import atomic

from shop.models import Order

app = Celery("shop", set_as_current=False)
tg = taskguard.connect()  # before there is a test database
mails = []

@app.task
@guarded_task(key="order:<order_id>")
def ship(order_id):
    with atomic():
        Order.objects.filter(pk=order_id).update(parcels=F("parcels") + 1)
    return "shipped"

@app.task
@guarded_task(key="order:<order_id>")
def mail(order_id):
    mails.append(order_id)

@tg.guarded(key="report:<day>")
def report(day):
    Order.objects.create(parcels=day)
"""
# Tests that know nothing of taskguard, as they are written for any other task.
PLAIN = """
from django.test import TestCase, TransactionTestCase
from shop.models import Order
from shop.tasks import mail, mails, report, ship
from taskguard_django.models import Work

class ShippingTest(TransactionTestCase):
    def ship(self):
        Order.objects.create(pk=1)
        for _ in range(2):
            self.assertEqual(ship.apply((1,)).get(), "shipped")
        self.assertEqual(Order.objects.get(pk=1).parcels, 1)
        self.assertEqual([work.key for work in Work.objects.all()], ["order:1"])

    def test_an_order_is_shipped_once(self):
        self.ship()

    def test_another_order_of_that_number_is_shipped_once(self):
        self.ship()

class ReportTest(TransactionTestCase):
    def test_what_was_connected_at_import(self):
        report(7)
        report(7)
        self.assertEqual(Order.objects.count(), 1)
        self.assertEqual(Work.objects.count(), 1)
"""
OURS = """
from django.db import transaction
from shop.models import Order
from shop.tasks import mail, mails, ship
from taskguard_django.test import GuardedTestCase
from taskguard_django.models import Work

class ShippingTest(GuardedTestCase):
    available_apps = ["taskguard_django", "shop"]  # Django says nothing of what it empties then

    def setUp(self):
        mails.clear()

    def ship(self):
        Order.objects.create(pk=1)
        for _ in range(2):
            self.assertEqual(ship.apply((1,)).get(), "shipped")
        self.assertEqual(Order.objects.get(pk=1).parcels, 1)
        names = [event.name for event in self.taskguard_events]
        self.assertEqual((names.count("completed"), names.count("duplicate")), (1, 1))
        self.assertNotIn("lock_unavailable", names)

    def test_an_order_is_shipped_once(self):
        self.ship()

    def test_another_order_of_that_number_is_shipped_once(self):
        self.ship()

    def test_nothing_is_known_of_either(self):
        self.assertFalse(Work.objects.exists())
        mail.apply((1,)).get()
        self.assertEqual(mails, [1])
"""
BY_PYTEST = """
import pytest
from shop.models import Order
from shop.tasks import mail, mails, report, ship
from taskguard_django.models import Work

def parcels():
    return sum(Order.objects.values_list("parcels", flat=True))

@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("time", [1, 2])
def test_without_a_fixture(time):
    Order.objects.create(pk=1)
    for _ in range(2):
        assert ship.apply((1,)).get() == "shipped"
    assert Order.objects.get(pk=1).parcels == 1

@pytest.mark.parametrize("time", [1, 2])
def test_twice(deliver_twice, taskguard_memory, time):
    Order.objects.create(pk=1)
    assert deliver_twice(ship, (1,)) == ("shipped", "shipped")
    assert parcels() == 1
    names = [event.name for event in taskguard_memory.events]
    assert names.count("duplicate") == 1 and "lock_unavailable" not in names

def test_wherever_it_is_killed(explore_crashes, db):
    Order.objects.create(pk=1)
    told = explore_crashes(ship, (1,), effects=parcels)
    points = [line.point for line in told.lines]
    assert "transaction.statement done" in points and "transaction.commit done" in points

def test_a_late_holder(lose_lease_at):
    Order.objects.create(pk=1)
    assert lose_lease_at(ship, (1,)).refused
    assert parcels() == 1

def test_what_was_connected_at_import(deliver_twice):
    deliver_twice(report, (7,))
    assert parcels() == 7
    assert [work.key for work in Work.objects.all()] == ["report:7"]
"""
# Without a database of its own, a test is not to write to the program's.
FORBIDDEN = """
from django.test import SimpleTestCase
from shop.tasks import report

class ForbiddenTest(SimpleTestCase):
    def test_it(self):
        with self.assertRaises(AssertionError):
            report(7)

def test_by_pytest():
    report(7)
"""
PLUGINS = "-p", "no:cacheprovider", "-p", "no:valkey", "-p", "no:platformdirs"
MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line
if __name__ == "__main__":  # processes of a parallel run import it again
    execute_from_command_line(sys.argv)
"""


pytestmark = pytest.mark.timeout(1200)


class Project:
    """A Django project in a folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.database = database_of(url)
        if "sqlite" in self.database["ENGINE"]:  # in memory unless told otherwise
            self.database["TEST"] = {"NAME": str(folder / "test.sqlite")}
        self.write("settings.py", SETTINGS.format(database=self.database, locks=None))
        self.write("manage.py", MANAGE)
        self.write("pytest.ini", "[pytest]\nDJANGO_SETTINGS_MODULE = settings\n")
        self.write("shop/models.py", MODELS)
        self.write("shop/tasks.py", TASKS)
        self.write("shop/migrations/0001_initial.py", MIGRATION)
        for package in "shop", "shop/migrations", "shop/tests":
            self.write(f"{package}/__init__.py", "")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def locks_are_away(self) -> None:
        """The configured lock server is not to be asked."""
        locks = "redis://127.0.0.1:1"
        self.write("settings.py", SETTINGS.format(database=self.database, locks=locks))

    def run(self, *arguments: str, code: int = 0) -> str:
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        given = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("TASKGUARD_", "PYTEST_"))
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**given, "PYTHONPATH": path},
            timeout=1000,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        return said

    def test(self, *arguments: str) -> str:
        return self.run("manage.py", "test", "--noinput", *arguments)

    def by_pytest(self, *arguments: str, code: int = 0) -> str:
        self.write("shop/tests/test_pytest.py", BY_PYTEST)
        return self.run("-m", "pytest", *PLUGINS, "-W", "error", "-ra", *arguments, code=code)


@pytest.fixture
def project(tmp_path: Path, pg_url: str) -> Iterator[Project]:
    made = Project(tmp_path, pg_url)
    yield made
    engine = sa.create_engine(pg_url)
    with engine.connect() as db:
        tables = sa.inspect(db).get_table_names()
        left = db.scalars(sa.text("select datname from pg_database")).all()
    engine.dispose()
    assert tables == [], "nothing was written to the database that is no test's"
    mine = sa.make_url(pg_url).database
    assert [name for name in left if f"test_{mine}" in name] == []


@pytest.mark.parametrize("more", [[], ["--parallel", "2"]])
def test_tests_that_know_nothing_of_it_pass(project: Project, more: list[str]) -> None:
    """The test database is dropped, and each test begins with an empty ledger."""
    project.write("shop/tests/test_plain.py", PLAIN)
    said = project.test(*more)
    assert "being accessed by other users" not in said
    assert "Ran 3 tests" in said


def test_a_guarded_test_case(project: Project) -> None:
    """A guarded test case has locks in memory, its events, and an empty ledger."""
    project.locks_are_away()
    project.write("shop/tests/test_ours.py", OURS)
    assert "Ran 3 tests" in project.test()
    assert "3 passed" in project.run("-m", "pytest", *PLUGINS, "shop/tests/test_ours.py")


def test_a_guarded_test_case_on_sqlite(tmp_path: Path, sqlite_url: str) -> None:
    """On SQLite the test database is a file, which is removed."""
    project = Project(tmp_path, sqlite_url)
    project.locks_are_away()
    project.write("shop/tests/test_ours.py", OURS)
    assert "Ran 3 tests" in project.test()
    assert not list(tmp_path.glob("*.sqlite*"))


def test_a_test_that_may_not_use_the_database_claims_nothing(project: Project) -> None:
    """In a test without database access, a claim raises Django's own error."""
    forbidden = "shop/tests/test_plain.py"
    project.write(forbidden, FORBIDDEN)
    assert "Ran 1 test" in project.test()
    said = project.run("-m", "pytest", *PLUGINS, forbidden, code=1)
    assert "Database access not allowed" in said or "queries to 'default' are not allowed" in said


@pytest.mark.parametrize("more", [["-n", "2"], ["--nomigrations"]])
def test_pytests_fixtures_have_djangos_test_database(project: Project, more: list[str]) -> None:
    """The fixtures deliver bodies with `atomic()` twice, kill them, and overtake them, in Django's
    test database."""
    need_redis_in_memory()
    project.locks_are_away()
    assert "7 passed" in project.by_pytest(*more)
