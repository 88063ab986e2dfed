-- Claim one key and one work that has no record, as most deliveries do. If there is a record, or
-- the key is not free, the statement changes nothing and returns no row. `records.sql` then reads
-- why, and `claim.sql` claims if that is allowed. If another claim has created the work in the
-- meantime, the statement takes the key, and returns no row either. Then both of these find the key
-- taken by this owner.
with granted as (
    insert into taskguard_keys as k (key, fence, owner, lease_until, works)
    select
        %(key)s::text, now_us, %(owner)s::text, now_us + %(ttl_us)s::bigint,
        %(work)s::text || E'\n'
    from (
        select
            (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
            set_config('lock_timeout', %(lock_timeout)s::text, true)
    ) clock
    where not exists (select from taskguard_work where id = %(work)s::text)
        and not exists (
            select from taskguard_messages
            where message = %(message)s::text and work = %(work)s::text
        )
    --| in_line
    on conflict (key) do update set
        fence = excluded.fence,
        owner = excluded.owner,
        lease_until = excluded.lease_until,
        works = case
            when starts_with(k.works, excluded.works) then k.works
            else left(
                excluded.works || coalesce(k.works, ''), greatest(400, length(excluded.works))
            )
        end
    where k.owner = '' and k.lease_until <= excluded.fence and k.fence < excluded.fence
    returning k.fence, k.lease_until
)
insert into taskguard_work (
    id, task, key, message, retries, state, final, fence, owner, lease_until,
    attempts, crashes, crashed_owner, fingerprint, call, due, created, started, trace
    --| position_columns
)
select
    %(work)s::text, %(task)s::text, %(key)s::text, %(message)s::text, 0,
    'PROCESSING', 0, fence, %(owner)s::text, lease_until,
    1, 0, '', %(fingerprint)s::text,
    %(call)s::text, case when %(call)s::text is not null then lease_until end,
    fence, fence, %(trace)s::text
    --| position_values
from granted
on conflict (id) do nothing
returning
    fence,
    -- Do not flush this commit: losing it in a crash of the database does no harm. The fence is the
    -- time, so that the next fence is higher anyway. And the key was free, so that no former holder
    -- can commit.
    set_config('synchronous_commit', 'off', true)
