"""Listeners on Engines, each once."""

from __future__ import annotations

import weakref
from typing import Any

import sqlalchemy as sa

__all__ = ["listen_once", "same_listeners"]

_listening: weakref.WeakKeyDictionary[sa.Engine, set[Any]] = weakref.WeakKeyDictionary()


def listen_once(engine: sa.Engine, event: str, listener: Any) -> None:
    """Add a listener to an Engine, unless it is there already.

    `sqlalchemy.event.contains` goes by the Engine's address, and so may take a new Engine for one
    that is gone and was at the same place in memory.
    """
    heard = _listening.setdefault(engine, set())
    if (event, listener) not in heard:
        heard.add((event, listener))
        sa.event.listen(engine, event, listener)


def same_listeners(copy: sa.Engine, of: sa.Engine) -> None:
    """Note that a copy of an Engine has its listeners, also those that it gets yet."""
    _listening[copy] = _listening.setdefault(of, set())
