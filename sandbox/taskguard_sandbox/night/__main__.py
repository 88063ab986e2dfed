"""`python -m taskguard_sandbox.night`: print the page "At three in the morning"."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import shlex
import subprocess
import sys

from taskguard_sandbox.night.page import HEAD, QUESTIONS
from taskguard_sandbox.night.scene import scene

_COLUMNS = 130
_MOST_LINES = 24


def main() -> None:
    """Print the page, with the output of each command on a terminal."""
    with contextlib.ExitStack() as night:
        with contextlib.redirect_stdout(io.StringIO()):
            night.enter_context(scene())
        print(HEAD, end="")
        for number, (question, answer, commands) in enumerate(QUESTIONS, 1):
            print(f"\n## {number}. {question}\n\n{answer}")
            for command in commands:
                print(f"\n```sh\ntaskguard {command}\n```\n\n```text\n{_output(command)}\n```")


def _output(command: str) -> str:
    """Return what the command prints on a terminal, without colours."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "taskguard", *shlex.split(command)]
    size = {"COLUMNS": str(_COLUMNS), "NO_COLOR": "1"}
    done = subprocess.Popen(words, stdout=theirs, stderr=theirs, env={**os.environ, **size})
    os.close(theirs)
    found = b""
    with contextlib.suppress(OSError):  # the command has closed its end
        while read := os.read(ours, 65_536):
            found += read
    os.close(ours)
    done.wait()
    text = re.sub(r"127\.0\.0\.1:\d+", "localhost", found.decode().replace("\r\n", "\n"))
    lines = text.rstrip().split("\n")
    more = [] if len(lines) <= _MOST_LINES else [f"… {len(lines) - _MOST_LINES} more lines"]
    return "\n".join([*lines[:_MOST_LINES], *more])


if __name__ == "__main__":
    main()
