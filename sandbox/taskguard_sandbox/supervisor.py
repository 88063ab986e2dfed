"""Run one server as long as the process that started it lives, then leave nothing behind.

Run as a script, with the standard library alone, between the starter and its server:

    echo '{"parent": 12, "folder": "/tmp/…", "cmd": […], …}' | python -I -S supervisor.py

It reads the command from a pipe, because all users of the machine can read arguments, and the
environment in the command may contain secrets.

It prints the server's pid, waits, and ends in one of two ways. The server ends: so does the
supervisor, with its exit code, after it ended what the server left running. The starter ends,
however (SIGKILL too): the supervisor kills the server with all its descendants and removes the
folder. If the supervisor itself is killed, Linux kills the server.

Guaranteed in full on Linux, where descendants that became daemons are adopted by the supervisor,
and best effort elsewhere. Why a process between: a death signal set by the starter itself would
fire when the *thread* that started the server ends, and could not remove the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IPC_RMID = 0
POLL_S = 0.05


def descendants(pid: int) -> list[int]:
    """Every living descendant of `pid`, parents first; without `pid` itself."""
    children: dict[int, list[int]] = {}
    for child, parent in _process_table():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def _process_table() -> list[tuple[int, int]]:
    """(pid, parent's pid) of every process, zombies left out."""
    if not sys.platform.startswith("linux"):
        lines = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return [(int(pid), int(ppid)) for pid, ppid in (line.split() for line in lines)]
    table = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # ended since the folder was read
            # The name in parentheses may hold anything; state and parent follow the last one.
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                table.append((int(entry.name), int(parent)))
    return table


def signal_tree(pid: int, number: int) -> None:
    """Signal `pid`, then its descendants, and processes that they have started meanwhile."""
    tree = [pid, *descendants(pid)]
    for member in tree:
        _signal(member, number)
    seen = set(tree)
    for member in tree:
        for late in descendants(member):
            if late not in seen:
                seen.add(late)
                _signal(late, number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def remove_shared_memory(folder: Path) -> None:
    """Removes the System V segment that a PostgreSQL killed in `folder` leaves in the kernel.

    PostgreSQL keeps one tiny segment as an interlock and names it in line 7 of postmaster.pid,
    which a clean end removes.
    """
    for pidfile in folder.glob("*/postmaster.pid"):
        lines = pidfile.read_text(encoding="utf-8").splitlines()
        if len(lines) >= 7 and len(lines[6].split()) == 2:
            ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), IPC_RMID, None)


def _run(spec: dict[str, Any]) -> NoReturn:
    parent: int = spec["parent"]
    folder = Path(spec["folder"])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = os.fork()
    if pid == 0:
        _become_server(spec)
    print(pid, flush=True)
    # The starter reads one line. An open pipe would block a process that waits for its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        status = _reap(pid)
        if status is not None:
            _end_descendants()
            os._exit(_exit_code(status))
        if os.getppid() != parent:
            _end_descendants()
            remove_shared_memory(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        _wait_for_change(pid, parent)


def _reap(pid: int) -> int | None:
    """Collects ended children, adopted ones too; the wait status of `pid` once it ended."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return status
        if not ended:
            return None


def _end_descendants() -> None:
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            for member in descendants(os.getpid()):
                _signal(member, signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _wait_for_change(pid: int, parent: int) -> None:
    """Returns when either process ended, or, where the system cannot tell, a moment later."""
    watched = []
    try:
        poll = select.poll()
        for process in (pid, parent):
            watched.append(os.pidfd_open(process))
            poll.register(watched[-1], select.POLLIN)
        # Bounded: a parent that ended and whose pid was taken at once would not be missed for long.
        poll.poll(2_000)
    except (AttributeError, OSError):
        time.sleep(POLL_S)
    finally:
        for handle in watched:
            os.close(handle)


def _become_server(spec: dict[str, Any]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        if spec["user"] is not None:
            uid, gid = spec["user"]
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after setuid, which clears it
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(spec["folder"])
        os.execve(spec["cmd"][0], spec["cmd"], spec["env"])
    finally:
        os._exit(127)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.buffer.readline())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _run(asked)
