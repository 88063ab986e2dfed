-- Claim one key and one work that has no record, as most deliveries do. If there is a record, or
-- the key is not free, the statement changes nothing and returns the records. If they allow a
-- claim, `claim.sql` makes it. If the key is granted but not the work, this claim has lost a race.
with clock as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true)
),
granted as (
    insert into taskguard_keys as k (key, fence, owner, lease_until)
    select %(key)s::text, now_us, %(owner)s::text, now_us + %(ttl_us)s::bigint
    from clock
    where not exists (select from taskguard_work where id = %(work)s::text)
        and not exists (
            select from taskguard_messages
            where message = %(message)s::text and work = %(work)s::text
        )
    --| in_line
    on conflict (key) do update set
        fence = excluded.fence,
        owner = excluded.owner,
        lease_until = excluded.lease_until
    where k.owner = '' and k.lease_until <= excluded.fence and k.fence < excluded.fence
    returning k.fence, k.lease_until
),
claimed as (
    insert into taskguard_work (
        id, task, key, message, retries, state, final, fence, owner, lease_until,
        attempts, crashes, crashed_owner, fingerprint, call, due, created, started, trace
        --| position_columns
    )
    select
        %(work)s::text, %(task)s::text, %(key)s::text, %(message)s::text, 0,
        'PROCESSING', 0, granted.fence, %(owner)s::text, granted.lease_until,
        1, 0, '', %(fingerprint)s::text,
        %(call)s::text, case when %(call)s::text is not null then granted.lease_until end,
        granted.fence, granted.fence, %(trace)s::text
        --| position_values
    from granted
    on conflict (id) do nothing
    returning 1 as done
)
select
    clock.now_us,
    granted.fence as granted_fence,
    claimed.done,
    case
        -- Do not flush this commit: losing it in a crash of the database does no harm. The fence is
        -- the time, so that the next fence is higher anyway. And the key was free, so that no
        -- former holder can commit.
        when granted.fence is not null then set_config('synchronous_commit', 'off', true)
        else (
            select json_build_array(
                w.id, w.message, w.retries, w.state, w.final, w.fence, w.owner, w.lease_until,
                w.attempts, w.crashes, w.progress, w.result, w.error, w.finished, w.fingerprint,
                w.trace, m.retries, m.deferrals, k.owner, k.lease_until
            )::text
            from (select) one
            left join taskguard_work w on w.id = %(work)s::text
            left join taskguard_messages m
                on m.message = %(message)s::text and m.work = %(work)s::text
            left join taskguard_keys k on k.key = %(key)s::text
        )
    end as found
from clock
left join granted on true
left join claimed on true
