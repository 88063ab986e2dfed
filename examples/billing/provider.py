"""A payment provider and a mail server, as they are elsewhere: no transaction of ours reaches them.

The provider charges once for each idempotency key. The mail server is down for the first mail.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing


class MailServerDownError(Exception):
    """Try again."""


def charge(cents: int, *, idempotency_key: str) -> str:
    """Take the money, and some time."""
    time.sleep(float(os.environ.get("PROVIDER_SECONDS", "0.3")))
    with closing(_book()) as book, book:
        book.execute("insert or ignore into charges values (?, ?)", (cents, idempotency_key))
    return f"receipt-{idempotency_key[:8]}"


def mail(subject: str) -> None:
    """Send a mail; the first one finds the server down."""
    with closing(_book()) as book, book:
        book.execute("insert into asked values (1)")
        (asked,) = book.execute("select count(*) from asked").fetchone()
        if asked > 1:
            book.execute("insert into mails values (?)", (subject,))
    if asked == 1:
        raise MailServerDownError("the mail server is down")


def book(table: str) -> list:
    """Return the entries in the provider's books."""
    with closing(_book()) as rows:
        return [value for value, *_ in rows.execute(f"select * from {table}")]


def _book() -> sqlite3.Connection:
    book = sqlite3.connect(os.environ["PROVIDER_BOOK"], timeout=30)
    book.executescript(
        "create table if not exists charges (cents int, key text unique);"
        "create table if not exists mails (subject text);"
        "create table if not exists asked (one int);"
    )
    return book
