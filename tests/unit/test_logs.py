"""Log records say which key, work and holder they are about."""

from __future__ import annotations

import contextvars
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

import taskguard
from taskguard import Guard, TaskGuard
from taskguard.errors import KeyBusyError
from taskguard.events import Contended, Dead, Failed, Lost, StaleRefused, Takeover, log_event
from taskguard.locks import MemoryLocks
from taskguard.logs import GuardFilter, add_guard

HELD_BY = "celery@web-3, pid 4711, message m-1"


@pytest.fixture
def tg() -> Iterator[TaskGuard]:
    made = taskguard.connect(locks=MemoryLocks(), ledger=None)
    yield made
    made.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that logs an event, and returns what its record says in `extra`."""
    caplog.set_level(logging.DEBUG, "taskguard")

    def log(event: Any) -> dict[str, Any]:
        caplog.clear()
        log_event(event)
        [record] = caplog.records
        found: dict[str, Any] = vars(record)["taskguard"]
        return found

    return log


class TestExtra:
    """`extra["taskguard"]` of the records of events."""

    @pytest.mark.parametrize("kind", [StaleRefused, Failed, Takeover])
    def test_of_an_attempt(self, said: Any, kind: Any) -> None:
        """It has the key, the work, the fencing token and the attempt."""
        found = said(kind(key="order:1", task="ship", work="ship order:1", fence=7, attempt=2))
        names = ("key", "task", "work", "fence", "attempt")
        assert [found[name] for name in names] == ["order:1", "ship", "ship order:1", 7, 2]

    @pytest.mark.parametrize("kind", [Lost, Dead])
    def test_of_every_event(self, said: Any, kind: Any) -> None:
        """It has the key and the work."""
        found = said(kind(key="order:1", work="ship order:1"))
        assert (found["key"], found["work"]) == ("order:1", "ship order:1")

    def test_of_a_taken_key(self, said: Any) -> None:
        """`holder` is the holder's worker and pid, `holder_message` its message."""
        found = said(Contended(key="order:1", holder="m-1", held_by=HELD_BY))
        assert (found["holder"], found["holder_message"]) == (HELD_BY, "m-1")
        assert "previous" not in found

    def test_a_message_has_the_id_that_its_queue_shows(self, said: Any) -> None:
        """The ledger's name of a job of RQ also has the time of its creation."""
        found = said(Failed(key="order:1", message="8d3f@1795907437.266319"))
        assert found["message"] == "8d3f"

    def test_of_a_takeover(self, said: Any) -> None:
        """`previous` is the worker that vanished."""
        found = said(Takeover(key="order:1", holder="m-1", held_by=HELD_BY))
        assert (found["previous"], found["holder_message"]) == (HELD_BY, "m-1")
        assert "holder" not in found

    def test_of_a_delivery(self, tg: TaskGuard, caplog: pytest.LogCaptureFixture) -> None:
        """The events of a call name its work."""
        caplog.set_level(logging.DEBUG, "taskguard")

        def take(key: str) -> None:
            with tg.lock(key):
                raise AssertionError("unreachable")

        @tg.guarded(key="order:<order>")
        def ship(order: int) -> None:
            with pytest.raises(KeyBusyError):
                contextvars.Context().run(take, f"order:{order}")

        ship(1)
        events = [vars(record)["taskguard"] for record in caplog.records]
        by_name = {each["name"]: each for each in events}
        assert by_name["released"]["work"].endswith("ship order:1")
        assert by_name["contended"]["work"] == ""
        assert by_name["contended"]["holder"].startswith("worker ")


class TestInsideABody:
    """Records of any logger inside a body."""

    @pytest.fixture
    def written(self) -> Iterator[io.StringIO]:
        """What a handler with the filter writes for the logger `shop`."""
        written, logger = io.StringIO(), logging.getLogger("shop")
        handler = logging.StreamHandler(written)
        handler.addFilter(GuardFilter())
        handler.setFormatter(
            logging.Formatter(
                "%(taskguard_key)s|%(taskguard_work)s|%(taskguard_fence)s|%(taskguard_attempt)s"
            )
        )
        logger.addHandler(handler)
        yield written
        logger.removeHandler(handler)

    def test_the_filter_adds_four_names(self, tg: TaskGuard, written: io.StringIO) -> None:
        """Inside a body they have values, and outside they are None."""
        fences = []

        @tg.guarded(key="order:<order>")
        def ship(order: int, guard: Guard) -> None:
            fences.append(guard.fence)
            with tg.lock("stock:1"):
                logging.getLogger("shop").warning("shipping")

        ship(1)
        logging.getLogger("shop").warning("between")
        inside, outside = written.getvalue().splitlines()
        key, work, fence, attempt = inside.split("|")
        assert (key, fence, attempt) == ("order:1", str(fences[0]), "1")
        assert work.endswith("ship order:1")
        assert outside == "None|None|None|None"

    def test_python_json_logger_writes_them(self, tg: TaskGuard) -> None:
        """A formatter for JSON writes the names of the filter, and `taskguard` of our events."""
        json_logger = pytest.importorskip("pythonjsonlogger.json")
        written = io.StringIO()
        handler = logging.StreamHandler(written)
        handler.addFilter(GuardFilter())
        handler.setFormatter(json_logger.JsonFormatter())

        @tg.guarded(key="order:<order>")
        def ship(order: int) -> None:
            record = logging.makeLogRecord({"msg": "shipping"})
            handler.handle(record)

        ship(1)
        [line] = map(json.loads, written.getvalue().splitlines())
        assert (line["taskguard_key"], line["taskguard_attempt"]) == ("order:1", 1)

    def test_structlog_has_them(self, tg: TaskGuard) -> None:
        """The processor adds the names inside a body, and nothing outside."""
        structlog = pytest.importorskip("structlog")
        capture = structlog.testing.LogCapture()
        logger = structlog.wrap_logger(None, processors=[add_guard, capture])

        @tg.guarded(key="order:<order>")
        def ship(order: int) -> None:
            logger.info("shipping")

        ship(1)
        logger.info("between")
        inside, outside = capture.entries
        assert inside["taskguard_key"] == "order:1"
        assert inside["taskguard_attempt"] == 1
        assert "taskguard_key" not in outside
