"""The blocks of code of README and docs, as they are printed."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "PAGES",
    "ROOT",
    "Block",
    "blocks_of",
    "commands_of",
    "inline_commands_of",
    "without_blocks",
]

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    str(file.relative_to(ROOT))
    for file in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").glob("**/*.md"),
    )
    if "_build" not in file.parts
)

_FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})(?P<language>\S*).*\n(?P<text>(?:.*\n)*?)(?P=fence)$", re.MULTILINE
)
_MAKE = re.compile(r"`(make [^`]*)`")
_OF_SERVICES = re.compile(r"^ *command: (\[.*\])$|^ExecStart=\S*/(\S+ .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block, `line` being that of its fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, *languages: str) -> list[Block]:
    """Return the blocks of these languages, from top to bottom. Without languages, return all."""
    source = (ROOT / page).read_text(encoding="utf-8")
    found = [
        Block(page, source.count("\n", 0, each.start()) + 1, each["language"], each["text"])
        for each in _FENCE.finditer(source)
    ]
    return [block for block in found if not languages or block.language in languages]


def without_blocks(page: str) -> str:
    """Return the text between its blocks."""
    return _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def commands_of(page: str) -> list[tuple[Block, str]]:
    """The lines of its blocks of shell, without comments, and the commands of its services."""
    lines = [(block, line) for block in blocks_of(page, "sh") for line in block.text.splitlines()]
    bare = [(block, re.sub(r"\s+#\s.*$|^#\s.*$", "", line)) for block, line in lines]
    typed = [(block, line.strip()) for block, line in bare if line.strip()]
    services = [
        (block, shlex.join(json.loads(listed)) if listed else line)
        for block in blocks_of(page, "yaml", "ini")
        for listed, line in _OF_SERVICES.findall(block.text)
    ]
    return typed + services


def inline_commands_of(page: str) -> list[str]:
    """Return the `make` commands in its prose."""
    return _MAKE.findall((ROOT / page).read_text(encoding="utf-8").replace("\n", " "))
