"""Draw the pictures of the documentation: `python docs/pictures/draw.py` writes one SVG file each.

A picture is 380 px wide, so that its text is readable on a phone. It has a background of its own,
and follows the reader's dark mode.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH = 380
STYLE = """
svg { font: 13px system-ui, sans-serif; }
.page { fill: #fff; stroke: #d0d7de; }
text { fill: #1f2328; } .small { font-size: 11.5px; } .soft { fill: #59636e; }
.box { fill: #eef4fc; stroke: #4a78b5; } .good { fill: #e6f6ea; stroke: #2f8a4a; }
.bad { fill: #fdecea; stroke: #c2453a; } .idle { fill: #f3f3f3; stroke: #8c959f; }
.line { stroke: #59636e; fill: none; } .dash { stroke-dasharray: 4 4; } .head { fill: #59636e; }
.life { stroke: #c4cbd3; } .strong { font-weight: 600; }
@media (prefers-color-scheme: dark) {
.page { fill: #151b23; stroke: #3d444d; } text { fill: #e6edf3; } .soft { fill: #9da7b3; }
.box { fill: #1b2b41; stroke: #6ea3e0; } .good { fill: #173322; stroke: #57b874; }
.bad { fill: #3b1d1b; stroke: #e5776d; } .idle { fill: #242a32; stroke: #7d8790; }
.line { stroke: #9da7b3; } .head { fill: #9da7b3; } .life { stroke: #3d444d; }
}
"""


class Picture:
    """Collect shapes, and write them as one SVG file."""

    def __init__(self, title: str, height: int) -> None:
        self.title = title
        self.height = height
        self.shapes: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self.shapes.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, *lines: str, kind: str = "box") -> None:
        """A box with its lines of text. The first line is bold if more follow."""
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" class="{kind}"/>'
        )
        top = y + h / 2 + 4.5 - (len(lines) - 1) * 7.5
        for number, line in enumerate(lines):
            first = number == 0
            self.text(x + w / 2, top + number * 15, line, "strong" if first else "small")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dash: bool = False) -> None:
        style = "line dash" if dash else "line"
        self.shapes.append(
            f'<path d="M{x1} {y1}L{x2} {y2}" class="{style}" marker-end="url(#head)"/>'
        )

    def life(self, x: float, y1: float, y2: float) -> None:
        self.shapes.append(f'<path d="M{x} {y1}V{y2}" class="life"/>')

    def svg(self) -> str:
        """The text of the file."""
        shapes = "\n".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" class="head"/>'
            "</marker></defs>\n"
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" '
            f'class="page"/>\n{shapes}\n</svg>\n'
        )


def states() -> Picture:
    it = Picture("States of work: NEW, PROCESSING, DONE, FAILED, DEAD", 330)
    it.box(20, 20, 120, 44, "NEW", "enqueued, parked")
    it.box(240, 20, 120, 44, "DONE", "effects committed", kind="good")
    it.box(115, 130, 150, 44, "PROCESSING", "a holder runs it")
    it.box(20, 250, 130, 44, "FAILED", "the body raised", kind="bad")
    it.box(225, 250, 135, 44, "DEAD", "holders vanished", kind="bad")
    it.arrow(75, 64, 130, 128)
    it.text(68, 104, "claim", "small soft", "end")
    it.arrow(165, 130, 100, 66, dash=True)
    it.text(142, 88, "given back", "small soft", "start")
    it.arrow(235, 130, 290, 66)
    it.text(278, 104, "commit", "small soft", "start")
    it.arrow(165, 174, 100, 248)
    it.text(104, 206, "error", "small soft", "end")
    it.arrow(132, 250, 190, 176, dash=True)
    it.text(172, 232, "retry", "small soft", "start")
    it.arrow(230, 174, 285, 248)
    it.text(276, 212, "3 crashes", "small soft", "start")
    it.text(20, 315, "Solid: the usual way. Dashed: the way back.", "small soft", "start")
    return it


def delivery() -> Picture:
    it = Picture("One delivery: admit, claim, body, complete, acknowledge", 420)
    lanes = {"queue": 48, "worker": 141, "lock server": 236, "database": 331}
    for name, x in lanes.items():
        it.box(x - 44, 14, 88, 26, name)
        it.life(x, 40, 400)
    queue, worker, locks, database = lanes.values()

    def call(y: float, start: float, end: float, text: str, *, dash: bool = False) -> None:
        it.arrow(start, y, end, y, dash=dash)
        it.text((start + end) / 2, y - 6, text, "small")

    call(75, queue, worker, "message")
    call(110, worker, locks, "take the lease")
    call(150, worker, database, "NEW → PROCESSING, fence 7")
    it.box(worker - 32, 168, 64, 130, "body")
    call(195, worker + 32, locks, "renew", dash=True)
    call(215, worker + 32, database, "renew", dash=True)
    call(250, worker + 32, database, "your writes")
    call(280, worker + 32, database, "DONE, if the fence is 7")
    call(325, worker, database, "COMMIT: both or neither")
    call(355, worker, locks, "end the lease")
    call(385, worker, queue, "acknowledge")
    return it


def fencing() -> Picture:
    it = Picture("A paused worker wakes up after its lease, and its commit is refused", 400)
    first, second, database = 75, 190, 310
    for x, name in ((first, "worker A"), (second, "worker B"), (database, "database")):
        it.box(x - 45, 14, 90, 26, name)
        it.life(x, 40, 385)
    it.arrow(first, 70, database, 70)
    it.text(150, 64, "claim: fence 7", "small", "start")
    it.box(
        first - 45,
        85,
        90,
        205,
        "paused",
        "its lease",
        "ends, and",
        "it does not",
        "know",
        kind="idle",
    )
    it.arrow(second, 165, database, 165)
    it.text(250, 159, "claim: fence 8", "small")
    it.arrow(second, 205, database, 205)
    it.text(250, 199, "writes", "small")
    it.arrow(second, 240, database, 240)
    it.text(250, 234, "COMMIT", "small")
    it.box(database - 50, 250, 100, 30, "committed", kind="good")
    it.arrow(first, 320, database, 320)
    it.text(190, 314, "writes, COMMIT with fence 7", "small")
    it.box(database - 50, 332, 100, 40, "refused", "8 is newer", kind="bad")
    return it


def line() -> Picture:
    it = Picture("The line of a key: one holder, parked messages, and the next promoted", 250)
    it.box(20, 20, 150, 50, "account:7", "held by message 1", kind="good")
    it.text(76, 98, "the line of account:7, in the database", "small soft", "start")
    for number, x in ((2, 14), (3, 104), (4, 194), (5, 284)):
        it.box(x, 110, 82, 44, f"message {number}", "waiting", kind="idle")
    it.arrow(55, 108, 55, 74)
    it.text(190, 40, "1 ends: 2 is promoted,", "small", "start")
    it.text(190, 56, "and a worker gets it", "small", "start")
    it.arrow(355, 200, 325, 158)
    it.text(365, 216, "a new message goes to the end", "small soft", "end")
    it.text(20, 238, "A message that waits occupies no worker.", "small soft", "start")
    return it


def parts() -> Picture:
    it = Picture("What runs where: web, broker, workers, lock server, database, sweep", 330)
    it.box(14, 20, 108, 44, "web process", "enqueue()")
    it.box(138, 20, 108, 44, "broker", "Redis, RabbitMQ", kind="idle")
    it.box(262, 20, 104, 44, "workers", "Celery, RQ")
    it.arrow(122, 42, 137, 42)
    it.arrow(246, 42, 261, 42)
    it.box(20, 140, 150, 58, "lock server", "who should try,", "may forget", kind="idle")
    it.box(
        210,
        140,
        150,
        58,
        "your database",
        "your rows, the ledger",
        "decides who commits",
        kind="good",
    )
    it.arrow(290, 64, 130, 138)
    it.text(150, 98, "leases", "small soft", "start")
    it.arrow(320, 64, 300, 138)
    it.text(320, 106, "claims", "small soft", "start")
    it.arrow(70, 64, 225, 138, dash=True)
    it.text(68, 106, "orders", "small soft", "end")
    it.box(14, 250, 166, 50, "sweep, relay", "send lost messages again")
    it.box(210, 250, 150, 50, "purge", "forgets old records")
    it.arrow(120, 250, 240, 200)
    it.arrow(285, 250, 285, 200)
    it.text(190, 320, "sweep and purge run from cron or as units", "small soft")
    return it


PICTURES = {
    "states": states,
    "delivery": delivery,
    "fencing": fencing,
    "line": line,
    "parts": parts,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
