"""Prometheus' own tool, which checks scrapes and tests alert rules."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from support.needs import missing

__all__ = ["check_metrics", "run"]

# Where `.ci/debian-servers` puts it.
_UNPACKED = "/usr/local/lib/taskguard-promtool/promtool"


def run(*arguments: str, text: str | None = None, cwd: Path | None = None) -> str:
    """Return what promtool prints. Fail unless it succeeds, and skip the test without it."""
    program = shutil.which("promtool") or shutil.which(_UNPACKED)
    missing(None if program else "promtool is not here: run .ci/debian-servers as root on Debian")
    done = subprocess.run(
        [str(program), *arguments],
        input=text,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def check_metrics(text: str) -> None:
    """Fail unless promtool finds nothing wrong with a scrape."""
    assert run("check", "metrics", text=text) == ""
