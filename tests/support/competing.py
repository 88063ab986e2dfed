"""A process that competes with others for the same work, through the ledger alone.

    python -m support.competing URL url|engine SEED

Work items are neighbours in the index, share keys crosswise, and come in another order in each
process. Some holders are late. The last line of its output is JSON: counts of the outcomes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter

import sqlalchemy as sa

from taskguard.errors import LedgerUnavailableError, StaleTokenError, TransactionRetryError
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import Answer, Claimed, ClaimRequest, MessageRef
from taskguard.model.lease import new_owner
from taskguard.model.states import Decision

COUNT = 40
TTL_S = 0.5
EFFECT = sa.text("insert into effects values (:item)")


def main(url: str, kind: str, seed: str) -> None:
    """Run until all work is done by some process."""
    ledger = SqlLedger(sa.create_engine(url) if kind == "engine" else url)
    mine = random.Random(int(seed))
    todo = list(range(COUNT))
    mine.shuffle(todo)
    counts: Counter[str] = Counter()
    deferrals = dict.fromkeys(todo, 0)
    while todo:
        work = todo.pop()
        message = MessageRef(f"m{seed}-{work}", deferrals=deferrals[work])
        request = request_for(work, f"m{seed}", message)
        found = ledger.claim(request)
        counts[type(found).__name__] += 1
        if isinstance(found, Answer):
            # Any other answer would leave the work to a message that no process here has.
            assert found.decision is Decision.DONE, found
            continue
        if isinstance(found, Claimed):
            late = mine.choice(["before", "in", "", "", ""]) if found.attempt <= 2 else ""
            time.sleep(2 * TTL_S * (late == "before"))
            try:
                with ledger.transaction(found.claim) as tx:
                    tx.db.execute(EFFECT, {"item": work})
                    time.sleep(2 * TTL_S * (late == "in"))
                    tx.complete_in_block(found.claim, None)
                continue
            except StaleTokenError:
                counts["stale"] += 1
            except (TransactionRetryError, LedgerUnavailableError):
                counts["again"] += 1  # SQLite had another writer for long
        else:
            counts["put off"] += _put_off(ledger, request, deferrals, work)
        todo.insert(0, work)
    ledger.close()
    print(json.dumps(counts))


def request_for(work: int, who: str, message: MessageRef) -> ClaimRequest:
    """Return the claim request of owner `who` for this work."""
    return ClaimRequest(
        keys=(f"goods:{work // 4}", f"order:{work:04}")[: 1 + work % 2],
        owner=new_owner(who),
        ttl_s=TTL_S,
        work=f"ship order:{work:04}",
        task="ship",
        message=message,
        max_crashes=1000,
    )


def _put_off(
    ledger: SqlLedger, request: ClaimRequest, deferrals: dict[int, int], work: int
) -> bool:
    """Defer the message: the copy that was published replaces it."""
    try:
        return ledger.defer(request, lambda number: deferrals.update({work: number}))
    except LedgerUnavailableError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
