"""Run a Python program in a process of its own.

Guarantees: a program that fails, or that does not end in time, fails the test with its errors.
"""

from __future__ import annotations

import subprocess
import sys

from support.waiting import patience_s

__all__ = ["run_script"]


def run_script(script: str, *arguments: str) -> str:
    """Run `script`, with warnings off, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=patience_s(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
