"""The thread that watches the deadlines of a database's answers."""

from __future__ import annotations

from support.scripts import run_script


def test_a_deadline_is_watched_while_the_interpreter_ends() -> None:
    """The last counts are sent then, and Python 3.12 starts no thread. An idle one has ended."""
    said = run_script(
        """
import atexit, socket, time
from taskguard.ledger.connections import deadlines

deadlines._LOOK_EVERY_S, deadlines._LINGER_ROUNDS = 0.01, 0
ours, theirs = socket.socketpair()


def watched():
    ours.settimeout(20)
    with deadlines.Deadline(ours, 0.1, place="here"):
        print(ours.recv(1) == b"")


atexit.register(watched)
with deadlines.Deadline(ours, 10, place="here"):
    pass
while deadlines._watch._running:
    time.sleep(0.01)
"""
    )
    assert said.strip() == "True"
