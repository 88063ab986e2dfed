-- Renews many leases, each only if its owner still holds all of its keys. The arrays have one element
-- for each key. Returns one letter for each lease: R: renewed, G: gone (a key has no owner), T: taken
-- by another owner, S: another transaction has locked a row, and the other leases must not wait for it.
create or replace function taskguard_locks_renew_1(
    holds integer[], asked text[], owners text[], ttls_us bigint[]
) returns text
language plpgsql as $body$
declare
    now_us bigint; got text[]; answers text;
begin
    select array_agg(l.key) into got
    from (
        select k.key from taskguard_locks k where k.key = any (asked)
        order by k.key for update skip locked
    ) l;
    now_us := extract(epoch from clock_timestamp()) * 1000000;
    with mine as materialized (
        select * from unnest(holds, asked, owners, ttls_us) as m (hold, key, owner, ttl_us)
    ),
    judged as materialized (
        select m.hold, case
            when bool_or(l.owner <> m.owner and l.until > now_us) then 'T'
            when bool_or(l.key is null or l.until <= now_us) then 'G'
            when bool_or(locked.key is null) then 'S'
            else 'R'
        end as answer
        from mine m
        left join taskguard_locks l on l.key = m.key
        left join unnest(got) as locked (key) on locked.key = m.key
        group by m.hold
    ),
    renewed as (
        update taskguard_locks l set until = now_us + m.ttl_us
        from mine m join judged j on j.hold = m.hold and j.answer = 'R'
        where l.key = m.key
    )
    select string_agg(answer, '' order by hold) into answers from judged;
    return answers;
end
$body$
