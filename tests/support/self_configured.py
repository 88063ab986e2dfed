"""Jobs whose own module says where locks and ledger are, as the tutorial's does."""

from __future__ import annotations

import os
import sys

# Modules that the work horse has before it loads this one, or at the fork if its worker has loaded
# it.
_found = set(sys.modules)
os.register_at_fork(after_in_child=lambda: _found.update(sys.modules))

import taskguard_rq  # noqa: E402
from taskguard import Guard  # noqa: E402

taskguard_rq.configure(locks=os.environ["OFFICE_LOCKS"], ledger=os.environ["OFFICE_LEDGER"])


@taskguard_rq.guarded_job(key="parcel:<parcel>")
def send(parcel: int, guard: Guard) -> list[str]:
    """Send one parcel; the result says what the horse had to load for it."""
    with guard.transaction() as db:
        db.exec_driver_sql("select 1")
    return sorted(set(sys.modules) - _found - {__name__})
