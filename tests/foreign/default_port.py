"""A plugin for the pytest of RQ's suite: its `Redis()` is the one at FOREIGN_REDIS_PORT."""

from __future__ import annotations

import inspect
import os
from typing import Any

import redis

_PORT = int(os.environ["FOREIGN_REDIS_PORT"])


def _set_default(function: Any) -> None:
    """The default of its parameter `port`, which may be given by position."""
    parameters = inspect.signature(function).parameters.values()
    may = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    function.__defaults__ = tuple(
        _PORT if each.name == "port" else each.default
        for each in may
        if each.default is not each.empty
    )


for _kind in (redis.Redis, redis.Connection):
    _set_default(inspect.unwrap(_kind.__init__))
