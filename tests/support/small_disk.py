"""A folder that is a small file system of its own, for one call and the processes it starts.

No other process sees the file system, which is in a mount namespace of its own. It is gone with the
last process that uses it. It needs Linux, and the right to mount.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNS = 0x00020000
CHUNK = 4096
FILE = "fill"


def unavailable(folder: Path) -> str | None:
    """None where a small disk can be made, else the reason in words."""
    try:
        on_small_disk(folder, 1, lambda: None)
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        return f"no file system can be mounted here: {error}"
    return None


def on_small_disk(folder: Path, megabytes: int, call: Callable[[], T], *, uid: int = 0) -> T:
    """Return the value of `call`. For it and its threads and processes, `folder` is a file system
    of this size, which `uid` owns."""

    def run() -> T:
        # A namespace belongs to a thread: others of this process do not see it.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        options = f"size={megabytes}m,uid={uid},mode=700"
        for words in (
            ["--make-rprivate", "/"],
            ["-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        ):
            subprocess.run(["mount", *words], check=True, capture_output=True)
        return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def fill(folder: Path) -> None:
    """Make the file FILE in `folder`, which takes all the room that is left."""
    with (folder / FILE).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(CHUNK))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
