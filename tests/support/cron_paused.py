"""Entries of `rq cron` in tests, with a broker that is paused when this module is loaded."""

from __future__ import annotations

import os

import redis

from support import cron_entries

__all__ = ["cron_entries"]

with redis.Redis.from_url(os.environ["PAUSED_BROKER"]) as client:
    client.client_pause(3000)
