-- Frees the keys that are still the owner's, and answers how many those were. Only where somebody
-- waits it sends a notification: one in every commit would let them pass one after the other.
-- A row with a token stays, for the next one has to be higher.
create or replace function taskguard_locks_free_1(asked text[], me text) returns bigint
language plpgsql as $body$
declare
    now_us bigint := extract(epoch from clock_timestamp()) * 1000000;
    freed bigint; wanted text[];
begin
    if cardinality(asked) > 1 then  -- in the order in which everybody locks them
        perform from taskguard_locks l where l.key = any (asked) order by l.key for update;
    end if;
    with gone as (
        delete from taskguard_locks l
        where l.key = any (asked) and l.owner = me and l.until > now_us and l.fence = 0
        returning l.key, l.wanted_until
    ),
    kept as (
        update taskguard_locks l set owner = '', until = 0
        where l.key = any (asked) and l.owner = me and l.until > now_us and l.fence > 0
        returning l.key, l.wanted_until
    )
    select count(*), array_agg(l.key) filter (where l.wanted_until > now_us)
    into freed, wanted
    from (select * from gone union all select * from kept) l;
    if wanted is not null then
        perform pg_notify('taskguard_locks', left(l.key, 1000)) from unnest(wanted) l (key);
    end if;
    return freed;
end
$body$
