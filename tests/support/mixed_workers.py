"""Workers of a user's own, with ours mixed in, in either order."""

from __future__ import annotations

from rq import SimpleWorker

from taskguard_rq import GuardedWorkerMixin


class MixedBefore(GuardedWorkerMixin, SimpleWorker):
    """As the standard library has its mixins."""


class MixedAfter(SimpleWorker, GuardedWorkerMixin):
    """As somebody may write it."""
