"""The page "At three in the morning": each command answers its question about a real night."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

import pytest

from support.pages import blocks_of, commands_of
from taskguard.cli import main
from taskguard_sandbox.night.page import HEAD, QUESTIONS
from taskguard_sandbox.night.scene import scene
from taskguard_sandbox.servers import Postgres, Valkey
from taskguard_sandbox.workers import CeleryWorker

pytestmark = pytest.mark.once
PAGE = "docs/how-to/at-three-in-the-morning.md"
ANSWERS = {
    "explain account:42": (
        "HELD since",
        "by     shop.rebalance",
        "4 wait, because the key is held",
    ),
    # Where `taskguard_celery` is loaded, the name of a message has the time of its sending.
    "waiting --key account:42": (
        "\t1\tshop.pay message:pay-51c2 account:42\tpay-51c2",
        "\twaiting\tcelery@web-3",
    ),
    "keys release": ("released from celery@web-2", "pid "),
    "keys --held": ("account:42", "shop.rebalance"),
    "work list --state DEAD": ("DEAD\t2\t2\tshop.report",),
    "work show": ("takeover of celery@web-1", "dead at celery@web-1", "Look for memory"),
    "work requeue": ("shop.mail mail:5", "shop.mail mail:6"),
    "work list --overdue": ("PROCESSING (left)\t1\t0\tshop.ship order:9",),
    "explain order:1": ("DONE",),
    "top": ("deliveries", "account:42"),
    "explain 'shop.report": ("2 holders vanished",),
    "waiting --by-line": ("account:42\t4\t",),
    "keys pause": ("account:8: paused by ",),
    "keys --paused": ("account:7", "ann@desk-2\tmanual correction, ticket 815"),
    "actions": ("requeue", "release", "pause", "web-2 is gone"),
    "explain 'shop.ship order:9'": ("no worker runs it", "send its message again by hand"),
    "explain --message": ("shop.pay message:pay-51c2 account:42  NEW",),
    "workers": ("celery@web-1", "celery@web-2", "celery@web-3"),
}


@pytest.fixture
def night(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for server in (Valkey, Postgres, CeleryWorker):
        if missing := server.available():
            pytest.skip(missing)
    before = dict(os.environ)
    with scene():
        yield
    os.environ.clear()
    os.environ.update(before)


def test_each_question_of_the_page_is_answered(
    night: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the page run in its order, and print what it says they print."""
    capsys.readouterr()
    said = {}
    for _, command in commands_of(PAGE):
        words = command.removeprefix("taskguard ")
        assert main(shlex.split(words)) == 0, (command, capsys.readouterr().err)
        said[words] = capsys.readouterr().out
    for begin, answers in ANSWERS.items():
        outputs = [text for words, text in said.items() if words.startswith(begin)]
        assert outputs, begin
        for answer in answers:
            assert answer in outputs[0], (begin, answer, outputs[0])


def test_the_page_has_twenty_questions_with_their_commands() -> None:
    """The page is the one that `python -m taskguard_sandbox.night` prints."""
    assert len(QUESTIONS) == 20
    commands = [f"taskguard {each}" for _, _, some in QUESTIONS for each in some]
    assert [command for _, command in commands_of(PAGE)] == commands
    outputs = list(blocks_of(PAGE, "text"))
    assert len(outputs) == len(commands)
    assert all(block.text.strip() for block in outputs)
    assert HEAD.startswith("# At three in the morning\n")
