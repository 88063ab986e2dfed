-- Deletes rows whose lease and token are older than `older_us`. Returns how many.
-- If `every_us` > 0, it does nothing if a process did so in the last `every_us`.
create or replace function taskguard_locks_forget_1(
    older_us bigint, every_us bigint, most integer
) returns bigint
language plpgsql as $body$
declare
    now_us bigint := extract(epoch from clock_timestamp()) * 1000000;
    gone bigint;
begin
    if every_us > 0 then
        -- No lock has the key chr(1): keys of locks consist of printable characters.
        insert into taskguard_locks as l (key, owner, until, fence, wanted_until)
        values (chr(1), '', 0, now_us, 0)
        on conflict (key) do update set fence = excluded.fence
        where l.fence not between excluded.fence - every_us and excluded.fence;
        if not found then
            return 0;
        end if;
    end if;
    delete from taskguard_locks
    where key in (
        select l.key from taskguard_locks l
        where l.until < now_us - older_us and l.fence < now_us - older_us
        limit most for update skip locked
    );
    get diagnostics gone = row_count;
    return gone;
end
$body$
