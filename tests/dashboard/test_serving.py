"""`taskguard dashboard`: the page on this machine, behind an address that works once."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("uvicorn")

from support.dashboard_clients import asgi
from support.dashboard_sample import Sample
from support.waiting import patience_s
from taskguard.cli import main
from taskguard_dashboard.routes import Dashboard
from taskguard_dashboard.serving import OneTime


def one_time(**options: Any) -> tuple[Any, str]:
    made = OneTime(Dashboard(Sample()), **options)
    return asgi(made), made.token


def test_the_token_works_once_and_gives_a_cookie() -> None:
    """Scripts cannot read the cookie, and other sites cannot send it."""
    ask, token = one_time(name="ann")
    assert ask("GET", "/", host="localhost").status == 403
    assert ask("GET", "/", {"token": token[:-1]}, host="localhost").status == 403
    answer = ask("GET", "/", {"token": token}, host="127.0.0.1:8642")
    cookie = answer.headers["set-cookie"]
    assert (answer.status, answer.headers["location"]) == (303, "./")
    assert re.fullmatch(r"\w+=[\w-]{40,}; Path=/; HttpOnly; SameSite=Strict", cookie)
    page = ask(
        "GET", "/key", {"key": "account:42"}, cookie=cookie.partition(";")[0], host="[::1]:8642"
    )
    assert page.status == 200
    assert "Operator: ann" in page.text
    assert ask("GET", "/", {"token": token}, host="localhost").status == 403
    name = cookie.partition("=")[0]
    assert ask("GET", "/", cookie=f"{name}=é", host="localhost").status == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_another_host_is_refused(host: str) -> None:
    """A page of another site could resolve its own name to this machine."""
    ask, token = one_time()
    assert ask("GET", "/", {"token": token}, host=host).status == 403
    assert ask("GET", "/", {"token": token}, host="localhost").status == 303


def test_the_address_of_another_loopback_is_accepted() -> None:
    """`--host 127.0.0.2` prints that address."""
    ask, token = one_time(host="127.0.0.2")
    assert ask("GET", "/", {"token": token}, host="127.0.0.3:8642").status == 403
    assert ask("GET", "/", {"token": token}, host="127.0.0.2:8642").status == 303


def test_two_pages_of_one_machine_have_two_cookies() -> None:
    """Cookies ignore ports, so the second page would end the session of the first."""
    cookies = set()
    for ask, token in (one_time(), one_time()):
        given = ask("GET", "/", {"token": token}, host="localhost").headers["set-cookie"]
        cookies.add(given.partition("=")[0])
    assert len(cookies) == 2


def test_a_viewer_changes_nothing() -> None:
    """`--read-only`."""
    ask, token = one_time(role="viewer")
    cookie = ask("GET", "/", {"token": token}, host="localhost").headers["set-cookie"]
    sent = {"cookie": cookie.partition(";")[0], "host": "localhost"}
    assert ask("GET", "/workers", **sent).status == 200
    assert ask("GET", "/release", {"key": "a"}, **sent).status == 403


def test_another_interface_needs_authorize(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise everybody in the network could try the address."""
    url = "sqlite://"
    assert main(["dashboard", "--ledger", url, "--host", "0.0.0.0"]) == 1
    assert "--authorize" in capsys.readouterr().err
    assert main(["dashboard", "--ledger", url, "--authorize", "os:nothing"]) == 1
    assert "--authorize os:nothing" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_is_none_is_an_option_that_is_wrong(port: str) -> None:
    """It is named before anything is opened."""
    with pytest.raises(SystemExit, match="2"):
        main(["dashboard", "--ledger", "sqlite://", f"--port={port}"])


def test_without_a_ledger_there_is_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says so at once, and not on each page."""
    assert main(["dashboard", "--locks", "redis://127.0.0.1:1"]) == 1
    assert "ledger" in capsys.readouterr().err


@contextmanager
def command(url: str, *options: str, cwd: Path | None = None) -> Iterator[Any]:
    """The command on a new ledger. Yields how to ask it, and the query of the printed address."""
    assert main(["ledger", "create", "--url", url]) == 0
    line = [sys.executable, "-P", "-m", "taskguard", "dashboard", "--ledger", url, "--port", "0"]
    with subprocess.Popen([*line, *options], stdout=subprocess.PIPE, text=True, cwd=cwd) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())
            assert address.hostname == "127.0.0.1"

            def ask(path: str, **headers: str) -> http.client.HTTPResponse:
                connection = http.client.HTTPConnection(
                    "127.0.0.1", address.port or 0, timeout=patience_s()
                )
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                answer.read()
                connection.close()
                return answer

            yield ask, address.query
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(patience_s())
    assert process.returncode == 130


def test_the_command_serves_the_page(sqlite_url: str) -> None:
    """It prints the address, answers there, and ends at Ctrl-C."""
    with command(sqlite_url) as (ask, query):
        assert ask("/").status == 403
        cookie = (ask(f"/?{query}").headers["set-cookie"] or "").partition(";")[0]
        assert ask("/doctor", Cookie=cookie).status == 200


def test_a_function_of_the_folder_grants_roles_and_read_only_holds(
    sqlite_url: str, tmp_path: Path
) -> None:
    """`--authorize` finds a module in the current folder. With `--read-only` nobody is operator."""
    (tmp_path / "roles.py").write_text("def role_of(request): return request.headers.get('role')")
    options = "--authorize", "roles:role_of", "--read-only"
    with command(sqlite_url, *options, cwd=tmp_path) as (ask, query):
        assert query == ""
        assert ask("/workers").status == 403
        for role in ("viewer", "operator"):
            assert ask("/workers", role=role).status == 200
            assert ask("/pause?key=order:7", role=role).status == 403
