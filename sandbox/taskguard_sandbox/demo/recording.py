"""Record a run of the demo as a picture: `python -m taskguard_sandbox.demo.recording FILE.svg`.

The picture shows the real output of a run, a line at a time. A pause between two lines is cut to
half a second. Lines that only count progress are left out, except the first one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["drawing", "main"]

_PAUSE_S = 0.5
_LINE_PX = 17
_WIDTH_PX = 900
_PROGRESS = re.compile(r" [1-9]\d* of [\d,]+ orders shipped")
_HINT = "Your own "
_COLOURS = {  # the first pattern that fits
    r"WRONG": "#ff7b72",
    r"^Right:|(double|lost) effects .* 0 ": "#56d364",
    r"stale commit refused|killed in the body|stopped in the body": "#ffa657",
    r" s  Celery ": "#79c0ff",
    r" s  RQ ": "#d2a8ff",
    r"": "#c9d1d9",
}
_STYLE = f"""
  rect {{ fill: #0d1117; stroke: #30363d; }}
  text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }}
  @media (prefers-reduced-motion: no-preference) {{
    text {{ animation: {_PAUSE_S / 5}s both show; }}
  }}
  @keyframes show {{ from {{ opacity: 0; }} }}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, and write the picture if the demo succeeds. Return the demo's exit status."""
    (target,) = sys.argv[1:] if argv is None else argv
    command = [sys.executable, "-m", "taskguard_sandbox.demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        lines = [(time.monotonic(), line.rstrip("\n")) for line in demo.stdout]
    if demo.returncode == 0:
        Path(target).write_text(drawing(lines), encoding="utf-8")
    return demo.returncode


def drawing(lines: Sequence[tuple[float, str]]) -> str:
    """The SVG of these lines, each with the time in seconds at which it was printed."""
    shown = [(0.0, "$ make demo"), *_timed(_shown(lines))]
    height = len(shown) * _LINE_PX + 24
    texts = "\n".join(
        f'  <text x="16" y="{(number + 1) * _LINE_PX + 8}" fill="{_colour(line)}"'
        f' style="animation-delay: {after_s:.1f}s" xml:space="preserve">{escape(line)}</text>'
        for number, (after_s, line) in enumerate(shown)
        if line
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH_PX} {height}"'
        f' width="{_WIDTH_PX}" height="{height}" role="img">\n'
        f"  <title>make demo</title>\n  <style>{_STYLE}  </style>\n"
        f'  <rect x="0.5" y="0.5" width="{_WIDTH_PX - 1}" height="{height - 1}" rx="8"/>\n'
        f"{texts}\n</svg>\n"
    )


def _shown(lines: Sequence[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    for at_s, line in lines:
        if not _PROGRESS.search(line) and not line.startswith(_HINT):
            yield at_s, line


def _timed(lines: Iterator[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Each line with the time of its appearance in the picture."""
    after_s, last_s = _PAUSE_S, None
    for at_s, line in lines:
        after_s += 0 if last_s is None else min(at_s - last_s, _PAUSE_S)
        last_s = at_s
        yield after_s, line


def _colour(line: str) -> str:
    return next(colour for pattern, colour in _COLOURS.items() if re.search(pattern, line))


if __name__ == "__main__":
    sys.exit(main())
