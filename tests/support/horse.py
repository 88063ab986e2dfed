"""Jobs that load nothing by themselves and say what their work horse has loaded, and looks for."""

from __future__ import annotations

import sys
from unittest import mock

import rq


def loaded(*names: str) -> list[str]:
    """Return which of the modules `names` were loaded before the job began."""
    return [name for name in names if name in sys.modules]


def looks_for_version() -> bool:
    """Return True if redis-py looks up its version when RQ's client opens another connection."""
    client = rq.get_current_job().connection
    with mock.patch("redis.utils.get_lib_version", return_value="0") as asked:
        client.connection_pool.make_connection()
    return asked.called
