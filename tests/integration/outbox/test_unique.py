"""`duplicate=` of an enqueue in each kind of transaction: what is sent, and what the caller
gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from integration.outbox.test_sweep import SweepRig
from sqlalchemy import orm

from support.databases import DATABASES
from taskguard import Guard
from taskguard.errors import AlreadyEnqueuedError, ConfigurationError, FingerprintMismatchError
from taskguard.integration import Delivery, MessageRef, enqueue_in
from taskguard.model.delivery import Dropped
from taskguard.outbox.enqueue import Placed


class Rig(SweepRig):
    """Enqueues messages that carry their arguments, and notes what was sent."""

    def delivery(self, order: str = "1", message: str | None = None) -> Delivery:
        made = super().delivery(order)
        message = message or "m"
        call = json.dumps({"queue": "test", "order": message, "message": message})
        return replace(made, message=MessageRef(message), call=call)

    def put(self, session: Any, message: str, duplicate: Any, **values: Any) -> Placed:
        delivery = replace(self.delivery(message=message), **values)
        return enqueue_in(session, self.runtime, delivery, self.send, duplicate=duplicate)

    def run(self, message: str) -> Any:
        """Deliver its message. The body returns its name."""
        return self.runtime.runner.deliver(self.delivery(message=message), lambda _: message)

    @property
    def messages(self) -> list[str]:
        return [message for message, _, _ in self.sent]


# The other tests are about decisions. The contract suite has the SQL of each database.
on_each_database = pytest.mark.parametrize("rig", DATABASES, indirect=True)


@pytest.fixture(params=["sqlite_url"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.getfixturevalue(request.param))
    yield made
    made.close()


@on_each_database
@pytest.mark.parametrize("duplicate", ["attach", "skip"])
def test_in_a_session_nothing_is_sent_for_the_second(rig: Rig, duplicate: str) -> None:
    """The second enqueue sends nothing, in one transaction or two. It returns the first one's
    message."""
    with orm.Session(rig.engine) as session:
        rig.put(session, "a", duplicate)
        second = rig.put(session, "b", duplicate)
        session.commit()
        third = rig.put(session, "c", duplicate)
        session.commit()
    for each in (second, third):
        assert each.outcome == {"attach": "attached", "skip": "skipped"}[duplicate]
        assert each.first is not None
        assert each.first.message == "a"
        each()
    assert rig.messages == ["a"]


def test_on_a_connection_of_its_own_it_is_stored_until_it_is_sent(rig: Rig) -> None:
    """On a plain connection the work is stored until the caller or a sweep sends it, because its
    COMMIT is not noticed."""
    with rig.engine.connect() as db:
        placed = rig.put(db, "a", "answer")
        placed()  # too early: the sweep's connection does not see it
        assert placed.outcome == "stored"
        db.commit()
    assert rig.messages == []
    rig.refused = {"a", "b"}
    placed()
    assert placed.outcome == "stored"
    rig.refused.remove("a")
    placed()
    assert placed.outcome == "sent"
    assert rig.messages == ["a"]
    with orm.Session(rig.engine) as session:
        later = rig.put(session, "b", "attach", work="test.put 2")
        assert later.outcome == "sent"  # as soon as this commits
        session.commit()
    assert later.outcome == "stored"


def test_refused_it_writes_nothing_and_the_session_goes_on(rig: Rig) -> None:
    """A refused enqueue writes nothing. The session's other writes are committed."""
    with orm.Session(rig.engine) as session:
        rig.put(session, "a", "raise")
        session.commit()
        with pytest.raises(AlreadyEnqueuedError, match="ship order:1 is enqueued, by message a"):
            rig.put(session, "b", "raise")
        session.commit()
    assert rig.messages == ["a"]


@on_each_database
def test_a_savepoint_takes_a_replacement_back(rig: Rig) -> None:
    """If a savepoint is rolled back, the older message runs."""
    with orm.Session(rig.engine) as session:
        rig.put(session, "a", "replace")
        session.commit()
        with session.begin_nested() as inner:
            assert rig.put(session, "b", "replace").outcome == "replaced"
            inner.rollback()
        session.commit()
    assert rig.messages == ["a"]
    assert rig.run("a").value == "a"


def test_on_a_connection_a_replacement_is_sent_by_hand_or_by_a_sweep(rig: Rig) -> None:
    """On a connection, the caller or a sweep sends a replacement. Sending after a rollback has no
    effect."""
    with rig.engine.connect() as db:
        first = rig.put(db, "a", "replace")
        db.commit()
        first()
        second = rig.put(db, "b", "replace")
        db.commit()
    assert rig.messages == ["a"]
    assert rig.run("a") == Dropped("replaced", by="b")
    second()
    assert rig.messages == ["a", "b"]
    rig.put(None, "c", "replace")
    rig.pass_time()
    rig.sweep()
    assert rig.messages == ["a", "b", "c", "c"]
    assert rig.run("b") == Dropped("replaced", by="c")
    assert rig.run("c").value == "c"
    assert rig.run("a").value == "c"


@on_each_database
def test_in_a_guarded_body_a_replacement_commits_with_done(rig: Rig) -> None:
    """A replacement in a body commits with DONE. If the body fails, the older message runs."""
    rig.put(None, "a", "replace")

    def body(guard: Guard, *, fails: bool) -> None:
        with guard.transaction() as db:
            rig.put(db, "b", "replace")
            if fails:
                raise ZeroDivisionError

    other = replace(rig.delivery("2"), message=MessageRef("other"), call=None)
    with pytest.raises(ZeroDivisionError):
        rig.runtime.runner.deliver(other, lambda guard: body(guard, fails=True))
    assert rig.messages == ["a"]
    rig.runtime.runner.deliver(other, lambda guard: body(guard, fails=False))
    assert rig.messages == ["a", "b"]
    assert rig.run("a") == Dropped("replaced", by="b")
    assert rig.run("b").value == "b"


def test_attaching_to_other_arguments_is_an_error(rig: Rig) -> None:
    """An enqueue with other arguments cannot attach: its error names `duplicate="replace"`, which
    works."""
    rig.put(None, "a", "attach", fingerprint="1")
    with pytest.raises(FingerprintMismatchError, match=r'on record.*duplicate="replace"'):
        rig.put(None, "b", "attach", fingerprint="2")
    assert rig.put(None, "c", "attach", fingerprint="1").outcome == "attached"
    assert rig.put(None, "d", "replace", fingerprint="2").outcome == "replaced"
    assert rig.messages == ["a", "d"]


def test_a_message_that_was_sent_too_often_does_not_bury_its_replacement(rig: Rig) -> None:
    """The count of a message's sendings does not apply to its replacement."""
    rig.put(None, "a", "replace")
    for _ in range(2):
        rig.pass_time()
        rig.sweep()
    rig.put(None, "b", "replace")
    rig.pass_time()
    assert rig.sweep(max_sends=2).sent == 1
    assert rig.run("b").value == "b"


def test_what_is_no_duplicate_is_refused(rig: Rig) -> None:
    """An unknown `duplicate=` is refused. So is any of them if each message is work of its own."""
    with pytest.raises(ConfigurationError, match="duplicate='once': give one of answer, attach"):
        rig.put(None, "a", "once")
    with pytest.raises(ConfigurationError, match="so no two are the same"):
        rig.put(None, "a", "attach", by_message=True)
    with rig.engine.connect() as db:
        assert db.execute(sa.text("select count(*) from taskguard_work")).scalar() == 0
