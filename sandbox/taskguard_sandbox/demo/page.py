"""The web page on the demo's data, once the counts are shown.

Guarantees: the page's process has ended when `show_page` returns. Ctrl-C ends the page, and then
the demo with its own exit status.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable

__all__ = ["show_page"]

_COMMAND = [sys.executable, "-m", "taskguard", "dashboard", "--port", "0"]


def show_page(say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, with the servers in the environment."""
    with contextlib.suppress(KeyboardInterrupt):
        page = subprocess.Popen(_COMMAND, stdout=subprocess.PIPE, text=True)
        try:
            assert page.stdout is not None
            address = page.stdout.readline().strip()
            say("")
            say("The web page on these orders and invoices. Ctrl-C ends it:")
            print(address, flush=True)  # in one line, however narrow the terminal is
            page.wait()
        finally:
            page.terminate()
            page.wait()
