"""How a shutdown looks from within a body, and what does not count as one."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.leaving import exiting_at_sigterm
from taskguard.run.shutdown import is_cancellation, is_shutdown


def raised_by(body: Callable[[], Any]) -> BaseException:
    try:
        body()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


class _Handling:
    def handle(self, number: int, frame: object) -> None:
        raise SystemExit(self)

    def __call__(self, number: int, frame: object) -> None:
        raise SystemExit(self)


def _deep(name: str, number: int, frame: object) -> None:
    def exit_by(given: int) -> None:
        del given
        sys.exit(name)

    exit_by(number)


def _forgetful(number: Any, frame: Any) -> None:
    del number, frame
    sys.exit()


@pytest.mark.parametrize(
    "handler",
    [
        None,
        lambda *_: sys.exit(),
        lambda number, frame: sys.exit(number),
        _Handling().handle,
        _Handling(),
        functools.partial(_deep, "a name"),
        _forgetful,
    ],
    ids=["resets itself", "star", "plain", "method", "callable", "partial", "forgetful"],
)
def test_an_exit_by_a_signals_handler_is_a_shutdown(handler: Any) -> None:
    """However it is written, and whatever the body makes of it on the way."""
    with exiting_at_sigterm(handler):
        assert is_shutdown(raised_by(terminate))

    def wraps() -> None:
        try:
            terminate()
        except SystemExit:
            raise SystemExit(3) from None

    with exiting_at_sigterm(handler):
        assert is_shutdown(raised_by(wraps))


def test_ctrl_c_is_a_shutdown_and_click_makes_an_exit_of_it() -> None:
    """Ctrl-C comes from the interpreter's own handler, which leaves no frame."""

    class AbortError(RuntimeError):
        pass

    def like_click() -> None:
        try:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:
                raise AbortError from error
        except AbortError:
            sys.exit(1)

    assert is_shutdown(raised_by(lambda: signal.raise_signal(signal.SIGINT)))
    assert is_shutdown(raised_by(like_click))


def test_a_body_that_exits_by_itself_is_none() -> None:
    """An exit of the body itself, in a thread, or after a handler's time limit is no shutdown."""

    class TimeLimitError(Exception):
        pass

    def raise_limit(number: int, frame: object) -> None:
        raise TimeLimitError

    def after_the_limit() -> None:
        try:
            terminate()
        except TimeLimitError:
            sys.exit(1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_shutdown(raised_by(interrupt))))
    thread.start()
    thread.join()
    with exiting_at_sigterm(raise_limit):
        found.append(is_shutdown(raised_by(after_the_limit)))
    found.append(is_shutdown(raised_by(lambda: sys.exit("usage: …"))))
    assert found == [False, False, False]


def test_a_killed_greenlet_is_a_shutdown() -> None:
    """A greenlet that gevent or eventlet kills counts as a shutdown."""
    greenlet = pytest.importorskip("greenlet")
    assert is_shutdown(greenlet.GreenletExit())


def test_cancellation_is_asyncios() -> None:
    """Not that of concurrent.futures, which is an Exception."""
    assert is_cancellation(asyncio.CancelledError())
    assert not is_cancellation(SystemExit())
    assert not is_shutdown(asyncio.CancelledError())
