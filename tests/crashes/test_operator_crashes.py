"""An operator's change whose process is killed around any message to the database.

Afterwards all rows of the change are written, and its action is on record, or nothing is. The same
call completes it, and records one action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from support.claims import request
from support.exploration import Exploration
from support.killing import KillAt, was_killed
from taskguard.errors import StaleTokenError
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import ACTIONS, COUNTS, KEYS, WORK
from taskguard.model.changes import Said
from taskguard.model.claims import Claim, Claimed
from taskguard.model.history import Action
from taskguard.model.lease import Owner
from taskguard.model.pauses import Pause, pause_names

ANN = Said("ann", "the host is gone")
OURS = Owner(*pause_names(Pause("ann", "the host is gone", 4e9)))
WORKS, HELD = ("ship order:1", "ship shop:1"), ("order:1", "shop:1")
Act = Callable[[SqlLedger, Claim], object]


def _release(ledger: SqlLedger, held: Claim) -> object:
    return ledger.release("order:1", fence=held.fence, owner=str(held.owner), by=ANN)


def _pause(ledger: SqlLedger, held: Claim) -> object:
    del held
    return ledger.try_pause("order:1", owner=OURS, by=ANN, now=True).paused


def _drop(ledger: SqlLedger, held: Claim) -> object:
    return ledger.change(str(held.work), Action.DROP, by=ANN)


@pytest.fixture(params=["pg_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    url = str(request.getfixturevalue(request.param))
    with closing(SqlLedger(url)) as ledger:
        ledger.create_schema()
    return url


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("act", "names"),
    [
        (_release, {*WORKS, *HELD}),
        (_pause, {*WORKS, *HELD}),
        (_drop, {*WORKS}),  # done and requeue are the same statements
    ],
)
def test_all_rows_change_or_none(
    url: str, engine: sa.Engine, exploration: Exploration, act: Act, names: set[str]
) -> None:
    """The holder has two keys, and its work two records, because its guard has changed."""
    kills = 0
    for at in exploration.numbers(step=3):
        held = _begin_again(url, engine, fails=act is _drop)
        before = _rows(engine)
        if not was_killed(lambda at=at, held=held: _killed(url, act, held, at)):  # type: ignore[misc]
            break
        kills += 1
        changed = _changed(before, _rows(engine))
        assert changed in (set(), names), at
        assert len(_actions(engine)) == bool(changed), at
        with closing(SqlLedger(url)) as ledger:
            assert act(ledger, held), at
            with pytest.raises(StaleTokenError):
                ledger.complete_alone(held, None)
        assert _changed(before, _rows(engine)) == names, at
        assert len(_actions(engine)) == 1, at
    assert kills > 1


def _begin_again(url: str, engine: sa.Engine, *, fails: bool) -> Claim:
    with engine.begin() as db:
        for table in (KEYS, WORK, ACTIONS, COUNTS):
            db.execute(sa.delete(table))
    with closing(SqlLedger(url)) as ledger:
        asked = request(1, keys=HELD, work=WORKS[0], formerly=WORKS[1:])
        found = ledger.claim(asked)
        assert isinstance(found, Claimed)
        if fails:
            ledger.fail(found.claim, "boom")
    return found.claim


def _killed(url: str, act: Act, held: Claim, at: int) -> None:
    ledger = SqlLedger(url)
    KillAt(ledger._database.engine, at)
    act(ledger, held)


def _rows(engine: sa.Engine) -> dict[str, Any]:
    with engine.connect() as db:
        keys = {row.key: row for row in db.execute(sa.select(KEYS))}
        return keys | {row.id: row for row in db.execute(sa.select(WORK))}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name, row in after.items() if before.get(name) != row}


def _actions(engine: sa.Engine) -> list[str]:
    with engine.connect() as db:
        return list(db.execute(sa.select(ACTIONS.c.action)).scalars())
