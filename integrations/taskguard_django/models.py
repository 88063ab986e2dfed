"""Read-only models of the ledger's keys, work and workers. The ledger manages their tables.

Do not write to them: no guarantee of taskguard holds then. `admin.py` has the permitted actions.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.db import models

from taskguard.integration import Names
from taskguard.locks import Owner
from taskguard_django.conf import alias, ledger

__all__ = ["Key", "Work", "Worker"]


class _OfTheLedger(models.Manager):
    """Queries the ledger's database, independently of the routers."""

    def get_queryset(self) -> Any:
        return super().get_queryset().using(alias())


def time_of(us: int | None) -> datetime | None:
    """Return µs since 1970 as a time in UTC, or None for None and 0."""
    return datetime.fromtimestamp(us / 1e6, UTC) if us else None


def _process_of(owner: str) -> str:
    return Names(ledger()).process(Owner.parse(owner))


class Key(models.Model):
    """A key: its last fencing token, its owner, and the end of the lease."""

    key = models.TextField(primary_key=True)
    fence = models.BigIntegerField()
    owner = models.TextField(blank=True)
    lease_until = models.BigIntegerField()
    slots = models.IntegerField(null=True)
    next_start = models.BigIntegerField(null=True)
    stamp = models.BigIntegerField(null=True)
    works = models.TextField(null=True)

    objects = _OfTheLedger()

    class Meta:
        managed = False
        db_table = "taskguard_keys"

    @property
    def process(self) -> str:
        """The holder's process, as in error messages, or "" if the owner has none."""
        return _process_of(self.owner)

    def __str__(self) -> str:
        return str(self.key)


class Work(models.Model):
    """The record of work: its state, its holder, its result or error."""

    class State(models.TextChoices):
        """The states, as in the ledger."""

        NEW = "NEW", "NEW"
        PROCESSING = "PROCESSING", "PROCESSING"
        DONE = "DONE", "DONE"
        FAILED = "FAILED", "FAILED"
        DEAD = "DEAD", "DEAD"

    id = models.TextField(primary_key=True)
    task = models.TextField()
    key = models.TextField()
    message = models.TextField()
    retries = models.IntegerField()
    state = models.TextField(choices=State.choices)
    final = models.SmallIntegerField()
    fence = models.BigIntegerField()
    owner = models.TextField(blank=True)
    lease_until = models.BigIntegerField()
    attempts = models.IntegerField()
    crashes = models.IntegerField()
    crashed_owner = models.TextField(blank=True)
    rounds = models.IntegerField(null=True)
    fingerprint = models.TextField(null=True)
    progress = models.TextField(null=True)
    result = models.TextField(null=True)
    error = models.TextField(null=True)
    call = models.TextField(null=True)
    sends = models.IntegerField(null=True)
    due = models.BigIntegerField(null=True)
    line = models.TextField(null=True)
    rank = models.IntegerField(null=True)
    parked = models.BigIntegerField(null=True)
    strict = models.SmallIntegerField(null=True)
    expires = models.BigIntegerField(null=True)
    base = models.TextField(null=True)
    history = models.TextField(null=True)
    flag = models.SmallIntegerField(null=True)
    since = models.BigIntegerField(null=True)
    also = models.TextField(null=True)
    trace = models.TextField(null=True)
    created = models.BigIntegerField()
    started = models.BigIntegerField(null=True)
    finished = models.BigIntegerField(null=True)

    objects = _OfTheLedger()

    class Meta:
        managed = False
        db_table = "taskguard_work"

    @property
    def process(self) -> str:
        """The process of its last holder, as in error messages, or "" if it had none."""
        return _process_of(self.owner)

    def __str__(self) -> str:
        return str(self.id)


class Worker(models.Model):
    """A worker: a process with all processes that it forks. Its number begins its owners."""

    number = models.TextField(primary_key=True)
    kind = models.TextField()
    name = models.TextField()
    host = models.TextField()
    pid = models.IntegerField()
    version = models.TextField()
    queues = models.TextField(blank=True)
    started = models.BigIntegerField()
    seen = models.BigIntegerField()

    objects = _OfTheLedger()

    class Meta:
        managed = False
        db_table = "taskguard_workers"

    def __str__(self) -> str:
        return str(self.name)
