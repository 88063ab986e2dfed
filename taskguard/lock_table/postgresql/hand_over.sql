-- Hands the keys that the finder still holds over to their true owner, which can then renew them.
-- Returns how many keys the true owner holds. A repeated call changes nothing.
create or replace function taskguard_locks_hand_over_1(
    asked text[], me text, true_owner text, ttl_us bigint
) returns bigint
language plpgsql as $body$
declare
    now_us bigint := extract(epoch from clock_timestamp()) * 1000000;
    already bigint; handed bigint;
begin
    select count(*) filter (where l.owner = true_owner and l.until > now_us) into already
    from (
        select * from taskguard_locks k where k.key = any (asked) order by k.key for update
    ) l;
    update taskguard_locks l set owner = true_owner, until = now_us + ttl_us
    where l.key = any (asked) and l.owner = me and l.until > now_us;
    get diagnostics handed = row_count;
    return already + handed;
end
$body$
