-- Claim one key without work: a plain lock.
with clock as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true)
),
granted as (
    insert into taskguard_keys as k (key, fence, owner, lease_until)
    select %(key)s::text, now_us, %(owner)s::text, now_us + %(ttl_us)s::bigint
    from clock
    on conflict (key) do update set
        fence = case
            when k.owner = excluded.owner then k.fence
            else greatest(k.fence + 1, excluded.fence)
        end,
        owner = excluded.owner,
        lease_until = excluded.lease_until
    where k.owner = excluded.owner or k.lease_until <= excluded.fence
    returning k.fence
)
select
    clock.now_us,
    granted.fence as granted_fence,
    holder.owner as holder,
    holder.lease_until as held_until,
    -- Do not flush this commit if losing it in a crash of the database does no harm. The fence must
    -- be the time, so that the next fence is higher anyway. And the key must have been free, so
    -- that no former holder can commit.
    case
        when granted.fence = clock.now_us and coalesce(holder.owner, '') = ''
            then set_config('synchronous_commit', 'off', true)
    end as flush
from clock
left join granted on true
-- The key as it was before: this statement does not see its own changes.
left join taskguard_keys holder on holder.key = %(key)s::text
