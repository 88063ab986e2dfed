"""A worker of a user's own, with ours mixed in behind its base class."""

from __future__ import annotations

from rq import SimpleWorker

from taskguard_rq import GuardedWorkerMixin


class MixedAfter(SimpleWorker, GuardedWorkerMixin):
    """`GuardedSimpleWorker` has them in the other order."""
