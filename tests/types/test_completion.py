"""Completions of a guard in an editor, from pyright's language server."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

# The cursor is at each `|`.
CODE = """\
import taskguard
from taskguard_celery import enqueue, guarded_task
from taskguard_rq import guarded_job
tg = taskguard.connect()
guarded_task(key="k", bus|)
guarded_task(key="k", busy="|")
guarded_job(key="k", order="|")
guarded_job(key="k", once_per="|")
tg.guarded(key="k", busy="|")
enqueue(None, duplicate="|")
enqueue(None, prio|)
"""
COMPLETED = [
    {"busy="},
    {"retry", "park", "latest", "supersede", "wait", "skip", "raise"},
    {"best_effort", "strict", "priority"},
    {"key", "run", "message", "tick"},
    {"wait", "raise"},
    {"answer", "attach", "skip", "replace", "raise"},
    {"priority="},
]


class Editor:
    """The client of a language server, which opens one file."""

    def __init__(self, server: subprocess.Popen[bytes], file: Path) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._to, self._from = server.stdin, server.stdout
        self._count = 0
        self._file = {"uri": file.as_uri()}
        self._lines = file.read_text().splitlines()
        root = file.parent.as_uri()
        self._request(
            "initialize",
            processId=None,
            rootUri=root,
            workspaceFolders=[{"uri": root, "name": "shop"}],
            capabilities={"workspace": {"configuration": True}},
        )
        self._send(method="initialized", params={})
        text = "\n".join(self._lines)
        opened = {**self._file, "languageId": "python", "version": 1, "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": opened})

    def completes(self, line: int, character: int) -> set[str]:
        """Return what is offered at a position: texts without their quotes, and keywords that
        begin with what is written there.
        """
        position = {"line": line, "character": character}
        found = self._request("textDocument/completion", textDocument=self._file, position=position)
        items = found["items"] if isinstance(found, dict) else found or []
        labels = {each["label"] for each in items}
        written = re.search(r"\w*$", self._lines[line][:character])
        begin = "" if written is None else written[0]
        fitting = {each for each in labels if re.fullmatch(rf'".*"|{begin}\w*=', each)}
        return {each.strip('"') for each in fitting}

    def _request(self, method: str, **params: Any) -> Any:
        self._count += 1
        self._send(id=self._count, method=method, params=params)
        while True:
            message = self._read()
            if "method" not in message and message.get("id") == self._count:
                return message["result"]
            if "method" in message and "id" in message:
                self._send(id=message["id"], result=self._answer(message))

    def _answer(self, message: dict[str, Any]) -> Any:
        if message["method"] != "workspace/configuration":
            return None
        python = {"pythonPath": sys.executable}
        asked = message["params"]["items"]
        return [python if each.get("section") == "python" else {} for each in asked]

    def _send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._to.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._to.flush()

    def _read(self) -> dict[str, Any]:
        length = 0
        while header := self._from.readline().strip():
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the language server has ended"
        message: dict[str, Any] = json.loads(self._from.read(length))
        return message


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed: it is in the group dev")
    file = tmp_path / "shop.py"
    file.write_text(CODE.replace("|", ""))
    command = [sys.executable, "-c", "import basedpyright.langserver as s; s.main()", "--stdio"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as server:
        try:
            yield Editor(server, file)
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # its launcher and the server itself


def test_options_and_their_values_are_completed(editor: Editor) -> None:
    """In every decorator, and in `enqueue()`."""
    lines = CODE.splitlines()
    cursors = [(line, text.index("|")) for line, text in enumerate(lines) if "|" in text]
    assert [editor.completes(*cursor) for cursor in cursors] == COMPLETED
