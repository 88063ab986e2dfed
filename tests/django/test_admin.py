"""The admin shows keys and work. Users with the permission can requeue and release them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from platform import node
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.claims import request
from support.django_shop import django_on
from support.guarded_shop import NotingQueue
from taskguard import Guard
from taskguard.errors import StaleTokenError
from taskguard.integration import Delivery, Policy, attempt_of
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.claims import Claim, Claimed, ClaimRequest, MessageRef
from taskguard.model.lease import Owner, new_owner
from taskguard.model.workers import Worker

WORKS_PAGE = "/admin/taskguard/work/"
KEYS_PAGE = "/admin/taskguard/key/"
WORKERS_PAGE = "/admin/taskguard/worker/"
LATER_US = 4_102_444_800_000_000  # the year 2100


class Office:
    """A ledger with some work on record, and the admin before it."""

    def __init__(self, url: str) -> None:
        from django.contrib.auth.models import Permission, User

        self.ledger = SqlLedger(url)
        self.engine = sa.create_engine(url)
        User.objects.create_superuser("root")
        looker = User.objects.create_user("looker", is_staff=True)
        looker.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))

    def client(self, name: str = "root") -> Any:
        from django.contrib.auth.models import User
        from django.test import Client

        client = Client()
        client.force_login(User.objects.get(username=name))
        return client

    def claim(self, order: int, owner: Owner | None = None) -> Claim:
        granted = self.ledger.claim(
            ClaimRequest(
                keys=(f"order:{order}",),
                owner=owner or new_owner(f"m{order}"),
                ttl_s=600.0,
                work=f"ship order:{order}",
                task="ship",
                message=MessageRef(f"m{order}"),
            )
        )
        assert isinstance(granted, Claimed), granted
        return granted.claim

    def state(self, order: int) -> str:
        view = self.ledger.view(f"ship order:{order}")
        assert view is not None
        return view.state.value

    def leases(self, order: int) -> list[int]:
        with self.engine.connect() as db:
            key = sa.select(KEYS.c.lease_until).where(KEYS.c.key == f"order:{order}")
            work = sa.select(WORK.c.lease_until).where(WORK.c.id == f"ship order:{order}")
            return [db.execute(key).scalar_one(), db.execute(work).scalar_one()]

    def close(self) -> None:
        self.engine.dispose()
        self.ledger.close()


@pytest.fixture(params=["pg_url", "sqlite_url"])
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    url = request.getfixturevalue(request.param)
    with django_on(default=url):
        made = Office(url)
        yield made
        made.close()


def change_page(order: int) -> str:
    from django.contrib.admin.utils import quote
    from django.urls import reverse

    return reverse("admin:taskguard_work_change", args=[quote(f"ship order:{order}")])


def post(client: Any, page: str, ids: list[str], **fields: Any) -> Any:
    return client.post(page, {"_selected_action": ids, **fields}, follow=True)


def test_pages_show_works_and_keys_and_no_way_to_write(office: Office) -> None:
    """The pages list work and keys, filtered by state or found by id, with readable times. Stored
    text is shown as text, and nothing can be changed."""
    office.ledger.fail(office.claim(7), "<b>no carrier</b>\nTraceback …")
    office.claim(8)
    client = office.client()
    page = client.get(WORKS_PAGE + "?state=FAILED").content.decode()
    assert "ship order:7" in page
    assert "ship order:8" not in page
    assert "&lt;b&gt;no carrier&lt;/b&gt;" in page
    assert "Traceback" not in page
    assert "ship order:8" in client.get(WORKS_PAGE + "?q=ship+order:8").content.decode()
    detail = client.get(change_page(7)).content.decode()
    assert "Traceback …" in detail
    assert re.search(r"Finished:.*?\d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d<", detail, re.DOTALL)
    for name in ("_save", "_continue", "_addanother", 'type="text"', "<textarea", "deletelink"):
        assert name not in detail
    held = client.get(KEYS_PAGE + "?held=yes").content.decode()
    assert "order:8" in held
    assert f" on {node()}, pid {os.getpid()}" in held
    with office.engine.begin() as db:  # its holder vanished
        db.execute(sa.update(KEYS).where(KEYS.c.key == "order:8").values(lease_until=1))
    assert "order:8" not in client.get(KEYS_PAGE + "?held=yes").content.decode()
    assert "order:8" in client.get(KEYS_PAGE + "?held=no").content.decode()
    for page in (WORKS_PAGE, KEYS_PAGE, WORKERS_PAGE):
        assert client.get(page + "add/").status_code == 403
    assert client.get(change_page(7).replace("change", "delete")).status_code == 403


def test_pages_name_workers(office: Office) -> None:
    """Keys and work show the worker and pid of their holder. Workers are listed."""
    other = Worker("1f2e3d4c", "celery", "celery@web-3", "web-3", 4700, "default,mail", "0.1.0")
    assert office.ledger.register_worker(other)
    office.claim(7, Owner(f"{other.number}{4711:06x}0123456789", "m7"))
    client = office.client()
    text = "celery@web-3, pid 4711"
    assert text in client.get(KEYS_PAGE + "?held=yes").content.decode()
    assert text in client.get(change_page(7)).content.decode()
    workers = client.get(WORKERS_PAGE + "?q=web-3").content.decode()
    for each in ("celery@web-3", "web-3", "4700", "default,mail"):
        assert each in workers
    page = client.get(f"{WORKERS_PAGE}{other.number}/change/").content.decode()
    assert re.search(r"Last seen:.*?\d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d<", page, re.DOTALL)


def test_a_record_links_to_its_page_if_the_project_has_the_page(office: Office) -> None:
    """Work and keys link to the web page, which has their history and all changes."""
    import types

    from django.test import override_settings
    from django.urls import include, path

    pytest.importorskip("jinja2")
    import taskguard_dashboard
    from support.django_urls import urlpatterns

    office.claim(7)
    client, key_page = office.client(), KEYS_PAGE + "order_3A7/change/"
    assert "View on site" not in client.get(change_page(7)).content.decode()
    page = taskguard_dashboard.django(
        taskguard.connect(locks=None, ledger=office.ledger),
        authorize=taskguard_dashboard.by_permissions,
    )
    urls: Any = types.ModuleType("urls")
    urls.urlpatterns = [*urlpatterns, path("ops/", include(page))]
    with override_settings(ROOT_URLCONF=urls):
        for shown, link in (
            (change_page(7), "/ops/item?work=ship+order%3A7"),
            (key_page, "/ops/key?key=order%3A7"),
        ):
            assert f'href="{link}"' in client.get(shown).content.decode()
            assert client.get(link).status_code == 200


def test_posting_a_change_writes_nothing(office: Office) -> None:
    """A posted form that the admin never showed writes nothing."""
    office.claim(7)
    page = change_page(7)
    answer = office.client().post(page, {"state": "DONE", "owner": "me", "_save": "Save"})
    assert answer.status_code == 403
    assert office.state(7) == "PROCESSING"


def test_requeue_asks_for_a_reason_and_takes_failed_works_alone(office: Office) -> None:
    """A requeue asks for a reason. The record and the admin's log have it, and the user's name."""
    from django.contrib.admin.models import LogEntry

    office.ledger.fail(office.claim(7), "no carrier")
    office.claim(8)
    client, both = office.client(), ["ship order:7", "ship order:8"]
    asked = post(client, WORKS_PAGE, both, action="requeue").content.decode()
    assert 'name="reason"' in asked
    assert "ship order:7 (FAILED)" in asked
    assert "order:8" not in asked
    asked = post(client, WORKS_PAGE, both, action="requeue", confirmed="yes", reason=" ")
    assert "Enter a reason" in asked.content.decode()
    assert office.state(7) == "FAILED"
    done = post(client, WORKS_PAGE, both, action="requeue", reason="carrier is back")
    assert "Requeued: ship order:7" in done.content.decode()
    assert "it has changed: ship order:8" in done.content.decode()
    assert (office.state(7), office.state(8)) == ("NEW", "PROCESSING")
    view = office.ledger.view("ship order:7")
    assert view is not None
    assert view.error == "requeued by root: carrier is back"
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message) == ("ship order:7", "requeued: carrier is back")


def test_requeue_skips_a_run_if_a_later_one_is_open(office: Office) -> None:
    """A FAILED run is skipped if a later run of the same work is open. Other work is requeued."""
    ledger = office.ledger
    runs = [request(7, message=MessageRef(name), by_run=True) for name in ("one", "two")]
    first = ledger.claim(runs[0])
    assert isinstance(first, Claimed)
    ledger.fail(first.claim, "no carrier", again_in_s=None)
    assert isinstance(ledger.claim(runs[1]), Claimed)
    ledger.fail(office.claim(8), "no carrier")
    chosen = ["ship order:7 run:one", "ship order:8"]
    done = post(office.client(), WORKS_PAGE, chosen, action="requeue", reason="carrier is back")
    assert "Requeued: ship order:8" in done.content.decode()
    assert "Skipped, because it has changed: ship order:7 run:one" in done.content.decode()


def test_release_takes_a_key_from_the_holder_that_was_shown(office: Office) -> None:
    """A release takes key and work from the holder on the page. Another holder keeps them."""
    office.claim(7)
    office.claim(8)
    client, both = office.client(), ["order:7", "order:8"]
    asked = post(client, KEYS_PAGE, both, action="release")
    shown = {f"holder:{key.pk}": f"{key.fence} {key.owner}" for key in asked.context_data["rows"]}
    for value in shown.values():
        assert value in asked.content.decode()
    shown["holder:order:8"] = "1 somebody/else"
    done = post(client, KEYS_PAGE, both, action="release", confirmed="yes", **shown)
    assert "Released: order:7" in done.content.decode()
    assert "it has changed: order:8" in done.content.decode()
    assert max(office.leases(7)) < min(office.leases(8))
    retaken = office.claim(7)
    assert retaken.fence > int(shown["holder:order:7"].split()[0])


def test_who_may_only_look_gets_no_action(office: Office) -> None:
    """A user who may only view gets no action, even by a form that was made by hand."""
    office.ledger.fail(office.claim(7), "no carrier")
    office.claim(8)
    client = office.client("looker")
    assert "ship order:7" in client.get(WORKS_PAGE).content.decode()
    assert 'name="action"' not in client.get(WORKS_PAGE).content.decode()
    post(client, WORKS_PAGE, ["ship order:7"], action="requeue", reason="because")
    with office.engine.connect() as db:
        row = db.execute(sa.select(KEYS).where(KEYS.c.key == "order:8")).one()
    holder = {"holder:order:8": f"{row.fence} {row.owner}"}
    post(client, KEYS_PAGE, ["order:8"], action="release", confirmed="yes", **holder)
    assert office.state(7) == "FAILED"
    assert min(office.leases(8)) > 0


def test_a_holder_that_lives_after_all_is_refused(office: Office, redis_url: str) -> None:
    """Its late commit is refused, and its message is deferred, whether or not another one has
    claimed."""
    tg = taskguard.connect(locks=redis_url, ledger=office.ledger)
    refused: list[BaseException] = []

    def body(guard: Guard) -> None:
        claim = attempt_of(guard).claim
        assert claim is not None
        holder = str(claim.owner)
        assert not tg.release(guard.key, fence=guard.fence - 1, owner=holder)
        assert tg.release(guard.key, fence=guard.fence, owner=holder)
        if guard.key == "order:8":
            assert office.claim(8).fence > guard.fence
        try:
            with guard.transaction():
                pass
        except StaleTokenError as error:
            refused.append(error)
            raise

    for order in (7, 8):
        delivery = Delivery(
            keys=(f"order:{order}",),
            work=f"ship order:{order}",
            task="ship",
            message=MessageRef(f"m{order}"),
            policy=Policy(),
            queue=NotingQueue(),
        )
        tg.runner.deliver(delivery, body)
    assert (office.state(7), office.state(8)) == ("NEW", "PROCESSING")
    assert len(refused) == 2
    tg.close()


class TestWholeLists:
    """An action on all pages: as the browser sends it, with what the page before it had."""

    MANY = 250

    @pytest.fixture(autouse=True)
    def unhurried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An action goes on until it has been through all rows, however slow the machine is."""
        monkeypatch.setattr("taskguard_django.admin._LONGEST_S", 600.0)

    def fill(self, office: Office, state: str) -> None:
        """Insert many rows of work and keys at once, held or ended."""
        numbers = range(1, self.MANY + 1)
        owner = str(new_owner("m"))
        work = {"task": "ship", "message": "m", "retries": 0, "state": state, "final": 0}
        work |= {"owner": owner, "attempts": 1, "crashes": 0, "crashed_owner": "", "created": 1}
        work |= {"started": 1, "finished": None if state == "PROCESSING" else 1}
        key = {"owner": owner, "lease_until": LATER_US}
        with office.engine.begin() as db:
            db.execute(sa.insert(KEYS), [{"key": f"order:{n}", "fence": n, **key} for n in numbers])
            rows = [
                {"id": f"ship order:{n}", "key": f"order:{n}", "fence": n, "lease_until": 0, **work}
                for n in numbers
            ]
            db.execute(sa.insert(WORK), rows)

    def choose(self, client: Any, page: str, ids: list[str], action: str) -> dict[str, Any]:
        """The fields of the page that asks, after everything was selected on all pages."""
        asked = post(client, page, ids, action=action, select_across="1")
        assert asked.status_code == 200
        html = asked.content.decode().partition('<form method="post">')[2]
        fields: dict[str, Any] = {}
        for tag in re.findall(r"<input[^>]*type=\"hidden\"[^>]*>", html):
            name, value = (re.search(rf'{each}="([^"]*)"', tag) for each in ("name", "value"))
            assert name is not None
            assert value is not None
            fields.setdefault(name[1], []).append(value[1])
        assert f"and {self.MANY - 100} more" in html
        assert sum(map(len, fields.values())) < 20
        return fields

    def test_requeue(self, office: Office) -> None:
        """All chosen work is requeued, except what became DEAD after the page was shown, and what
        the filter excludes."""
        self.fill(office, "DEAD")
        office.ledger.fail(office.claim(8_000), "no carrier")
        client, page = office.client(), WORKS_PAGE + "?state__exact=DEAD"
        fields = self.choose(client, page, ["ship order:1"], "requeue")
        with office.engine.begin() as db:
            db.execute(sa.update(WORK).where(WORK.c.id == "ship order:7").values(finished=LATER_US))
        done = client.post(page, {**fields, "reason": "carrier is back"}, follow=True)
        assert done.status_code == 200
        assert f"and {self.MANY - 1 - 10:,} more" in done.content.decode()
        with office.engine.connect() as db:
            counted = sa.select(WORK.c.state, sa.func.count()).group_by(WORK.c.state)
            found = {row.state: row[1] for row in db.execute(counted)}
        assert found == {"NEW": self.MANY - 1, "DEAD": 1, "FAILED": 1}
        assert office.state(7) == "DEAD"

    def test_release(self, office: Office) -> None:
        """All chosen holders lose their keys, except one that has claimed since the page was
        shown."""
        self.fill(office, "PROCESSING")
        client = office.client()
        fields = self.choose(client, KEYS_PAGE, ["order:1"], "release")
        with office.engine.begin() as db:
            db.execute(sa.update(KEYS).where(KEYS.c.key == "order:7").values(fence=LATER_US))
        done = client.post(KEYS_PAGE, fields, follow=True)
        assert done.status_code == 200
        held = sa.select(KEYS.c.key).where(KEYS.c.owner != "")
        with office.engine.connect() as db:
            assert db.execute(held).scalars().all() == ["order:7"]

    def test_what_takes_too_long_is_left(
        self, office: Office, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An action that takes too long ends, and the page shows how many rows are left."""
        monkeypatch.setattr("taskguard_django.admin._LONGEST_S", -1.0)
        self.fill(office, "DEAD")
        client = office.client()
        fields = self.choose(client, WORKS_PAGE, ["ship order:1"], "requeue")
        done = client.post(WORKS_PAGE, {**fields, "reason": "x"}, follow=True)
        assert f"with {self.MANY} rows left" in done.content.decode()
        assert office.state(1) == "DEAD"


def test_what_a_leader_remembers_is_no_work(office: Office) -> None:
    """A leader's record is not listed as work."""
    tg = taskguard.connect(locks=None, ledger=office.ledger)
    pages: list[str] = []

    def lead(leadership: taskguard.Leadership) -> None:
        leadership.remember("x")
        pages.append(office.client().get(WORKS_PAGE).content.decode())

    tg.leader("beat").run(lead)
    assert "leader:beat" not in pages[0]


def test_the_ledgers_own_mark_is_no_key(office: Office) -> None:
    """The ledger's own mark is not listed as a key."""
    office.claim(1)
    assert office.ledger.mark(make=True)
    for filtered in ("", "?held=yes"):
        page = office.client().get(KEYS_PAGE + filtered)
        assert page.status_code == 200
        said = page.content.decode()
        assert "order:1" in said
        assert "the database" not in said
