#!/usr/bin/env python3
"""Find prose that readers stumble over, and fail if a folder has too much of it.

    prose.py [--quiet]        print the findings per 1,000 words of each folder; check the limits
    prose.py --show PATH ...  print each finding in these files and folders

It reads Markdown without code, docstrings, comments and messages of Python, and comments of SQL and
Lua. A finding is a passage to read again, not an error. Words in backquotes are code.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST = 30
"""Words of a sentence. Aim at 25."""

LIMITS = {
    "README.md": 3,
    "CHANGELOG.md": 3,
    "CONTRIBUTING.md": 3,
    "SECURITY.md": 3,
    "docs": 3,
    "taskguard": 3,
    "integrations": 3,
    "examples": 3,
    "sandbox": 3,
    "tests": 4,
    "benchmarks": 4,
}
"""Findings per 1,000 words. Each folder in `taskguard` and `integrations` is measured alone."""

START = r"(?:^|(?<=[.:;!?]\s))"
VERBS = "am|are|is|was|were|has|had|have|does|did|do|may|can|must|will|would|[a-z]{3,}s"
SUBJECTS = "it|its|they|their|there|he|this|that|no|nothing|all|each|one|the|an?"
PHRASES = (
    r"in vain",
    r"by and by",
    r"all the same",
    r"at the latest",
    r"in any case",
    r"two times",
    r"(?:where|there|here)(?:by|in)",
    r"(?:is|are) to be",
    r"(?:may not|cannot) be had",
    r"from then on",
    r"out of which",
    r"of themselves",
    r"by itself alone",
    r"it happens that",
)
RULES = {
    name: re.compile(pattern)
    for name, pattern in {
        "a person's pronoun": r"\b(?:he|him|his|himself|somebody|nobody|anybody|everybody)\b",
        "whoever, whom": r"\b[Ww]ho(?:ever|m|mever)\b",
        "a clause as the subject": (
            rf"{START}(?:Who(?:ever|se|m)?|What(?:ever)?|That which|Those who)\b(?![^.!?]*\?)"
        ),
        "who without a noun": (
            r"\b(?:of|by|for|from|to|than|and|or|if|until|before|after|behind|beside) "
            rf"who (?:{VERBS}|held|lost|got|began|ran|sent|came|never)\b"
        ),
        "a fragment": (
            rf"{START}(?:Nor|Beside|Of(?! course)|So (?:far|long|many|much|often|old)(?! as)|"
            r"By(?! (?:default|design|contrast|convention|comparison|[a-z]+ing)))\b"
        ),
        "'for' instead of 'because'": rf", for (?:{SUBJECTS})\b(?= \w+ (?:{VERBS}|cannot)\b)",
        "an old or foreign phrase": rf"\b(?:{'|'.join(PHRASES)})\b",
    }.items()
}
STATEMENT = re.compile(
    r"\s*(?:select|insert|update|delete|with|create|alter|drop|begin|local|return|if redis)\b",
    re.IGNORECASE,
)

Paragraphs = Iterator[tuple[int, str]]


def in_markdown(text: str) -> Paragraphs:
    """Paragraphs, list items, definitions and cells. Headings and code are left out."""
    block: list[str] = []
    fence = ""
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.strip()
        opening = re.match(r"`{3,}|~{3,}", line)
        if fence or opening:
            fence = "" if fence and line == fence else fence or opening[0]
            line = ""
        starts = re.match(r"(?:[*+:-]|\d+\.|>|:{3,})(?:\s|$|\{)", line)
        if block and (not line or starts or line[0] in "#|"):
            yield number - len(block), " ".join(block)
            block = []
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip("|").split("|"))
        elif line and not line.startswith(("#", ":::", "<")):
            block.append(re.sub(r"^(?:[*+:>-]|\d+\.)\s+", "", line))


def in_comments(lines: Iterator[tuple[int, str]]) -> Paragraphs:
    """Neighbouring comment lines are one paragraph."""
    block: list[str] = []
    last = 0
    for number, line in lines:
        if block and number != last + 1:
            yield last - len(block) + 1, " ".join(block)
            block = []
        block.append(line)
        last = number
    if block:
        yield last - len(block) + 1, " ".join(block)


def in_python(text: str) -> Paragraphs:
    """Docstrings, comments, and strings of five words or more on one or two lines."""
    tree = ast.parse(text)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(words)) if id(node) not in parts:
                pass
            case ast.JoinedStr(values=values):
                words = "".join(
                    str(v.value) if isinstance(v, ast.Constant) else "x" for v in values
                )
            case _:
                continue
        code = words.count("\n") > 2 and id(node) not in alone
        if len(words.split()) > 4 and not code and not STATEMENT.match(words):
            line = node.lineno
            for paragraph in re.split(r"\n\s*\n|\n(?=\s+\*{0,2}\w+: |\s*\* )", words):
                yield line, " ".join(paragraph.split())
                line += paragraph.count("\n") + 1
    tokens = tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__)
    yield from in_comments(
        (token.start[0], token.string.strip("# "))
        for token in tokens
        if token.type == tokenize.COMMENT
        and not re.match(r"#!|#\s*(?:noqa|type:|pragma|pyright)", token.string)
    )


def in_statements(text: str) -> Paragraphs:
    """The comments of SQL and Lua."""
    found = (re.match(r"\s*--+\s?(.*)", line) for line in text.splitlines())
    yield from in_comments((n, comment[1]) for n, comment in enumerate(found, 1) if comment)


READERS = {".md": in_markdown, ".py": in_python, ".sql": in_statements, ".lua": in_statements}


def findings(paragraph: str) -> Iterator[tuple[str, str]]:
    """The name of each rule that the paragraph breaks, and the words there."""
    plain = re.sub(r"`+[^`]+`+", "x", paragraph)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    for name, rule in RULES.items():
        for found in rule.finditer(plain):
            yield name, plain[max(0, found.start() - 30) : found.end() + 50]
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", plain):
        if len(sentence.split()) > LONGEST and not re.search(r"::|→|\d{3}\D.*\d{3}", sentence):
            yield f"more than {LONGEST} words", sentence[:100]


def files(top: Path) -> Iterator[Path]:
    """The readable files in a folder, without hidden and built ones."""
    if top.is_file():
        yield top
    for path in sorted(top.rglob("*")) if top.is_dir() else ():
        inner = path.relative_to(top).parts
        if path.suffix in READERS and not any(part.startswith((".", "_build")) for part in inner):
            yield path


def folder_of(path: Path) -> str:
    """The folder under which the findings of a file are counted."""
    top, *rest = path.relative_to(ROOT).parts
    return f"{top}/{rest[0]}" if top in ("taskguard", "integrations") and len(rest) > 1 else top


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--show", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--quiet", action="store_true", help="print the folders above a limit only")
    options = parser.parse_args()
    words: dict[str, int] = {}
    counts: dict[str, int] = {}
    for top in options.show or [ROOT / name for name in LIMITS]:
        for path in files(top.resolve()):
            folder = folder_of(path)
            for line, paragraph in READERS[path.suffix](path.read_text(encoding="utf-8")):
                found = list(findings(paragraph))
                words[folder] = words.get(folder, 0) + len(paragraph.split())
                counts[folder] = counts.get(folder, 0) + len(found)
                for name, excerpt in found if options.show else ():
                    print(f"{path.relative_to(ROOT)}:{line}: {name}: …{excerpt}…")
    bad = False
    for folder, number in words.items():
        rate = counts[folder] / max(1, number) * 1000
        limit = LIMITS[folder.partition("/")[0]]
        bad |= (above := rate > limit)
        if above or not options.quiet:
            print(
                f"{folder:32} {number:6} words {counts[folder]:4} findings {rate:5.1f} per 1,000"
                + (f": above the limit of {limit}" if above else "")
            )
    if bad and not options.show:
        print(
            "Prose above the limit. List the passages with: make prose SHOW=FOLDER", file=sys.stderr
        )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
