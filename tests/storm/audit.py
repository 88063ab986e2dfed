"""The database's own log: every change of a row of keys and of work, in order.

Triggers write it in the transaction of the change, so that both commit or neither does. Rows of one
key are in the order of their changes, because only one transaction can lock the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

_SETUP = """
create table effects (item text, fence bigint, pid integer);
create table audit (
    id bigserial, at_us bigint, kind text, name text,
    old_state text, state text, old_fence bigint, fence bigint,
    old_owner text, owner text, old_until bigint, until bigint
);
create function note_key() returns trigger language plpgsql as $$ begin
    insert into audit (at_us, kind, name, old_fence, fence, old_owner, owner, old_until, until)
    values ((extract(epoch from clock_timestamp()) * 1000000)::bigint, 'key', new.key,
            case when tg_op = 'UPDATE' then old.fence end, new.fence,
            case when tg_op = 'UPDATE' then old.owner end, new.owner,
            case when tg_op = 'UPDATE' then old.lease_until end, new.lease_until);
    return new;
end $$;
create function note_work() returns trigger language plpgsql as $$ begin
    insert into audit (at_us, kind, name, old_state, state, old_fence, fence, old_owner, owner,
                       old_until, until)
    values ((extract(epoch from clock_timestamp()) * 1000000)::bigint, 'work', new.key,
            case when tg_op = 'UPDATE' then old.state end, new.state,
            case when tg_op = 'UPDATE' then old.fence end, new.fence,
            case when tg_op = 'UPDATE' then old.owner end, new.owner,
            case when tg_op = 'UPDATE' then old.lease_until end, new.lease_until);
    return new;
end $$;
create trigger note after insert or update on taskguard_keys
    for each row execute function note_key();
create trigger note after insert or update on taskguard_work
    for each row execute function note_work();
"""


@dataclass(frozen=True)
class Change:
    """A row of a key or of a work was made (`old_…` are None) or changed."""

    id: int
    at_us: int
    kind: str
    name: str
    old_state: str | None
    state: str | None
    old_fence: int | None
    fence: int
    old_owner: str | None
    owner: str
    old_until: int | None
    until: int


def create(engine: sa.Engine) -> None:
    """The table of effects, without a unique index, and the account of taskguard's tables."""
    with engine.begin() as db:
        db.connection.cursor().execute(_SETUP)


def create_effects(engine: sa.Engine) -> None:
    """The table of effects alone."""
    with engine.begin() as db:
        db.exec_driver_sql(_SETUP.partition(";")[0])


def changes(engine: sa.Engine) -> list[Change]:
    """Return all changes, except those of the ledger's own mark among the keys."""
    with engine.connect() as db:
        rows = db.execute(sa.text("select * from audit where name <> 'the database' order by id"))
        return [Change(*row) for row in rows]
