-- Frees the keys that are still the owner's, and answers how many those were. Only where somebody
-- waits it sends a notification: one in every commit would let them pass one after the other.
-- A row with a token stays, for the next one has to be higher.
create or replace function taskguard_locks_free_1(asked text[], me text) returns bigint
language plpgsql as $body$
declare
    now_us bigint := extract(epoch from clock_timestamp()) * 1000000;
    freed bigint := 0; lock record;
begin
    for lock in
        select l.key, l.fence, l.wanted_until from taskguard_locks l
        where l.key = any (asked) and l.owner = me and l.until > now_us
        order by l.key for update
    loop
        if lock.fence = 0 then
            delete from taskguard_locks l where l.key = lock.key;
        else
            update taskguard_locks l set owner = '', until = 0 where l.key = lock.key;
        end if;
        if lock.wanted_until > now_us then
            perform pg_notify('taskguard_locks', left(lock.key, 1000));
        end if;
        freed := freed + 1;
    end loop;
    return freed;
end
$body$
