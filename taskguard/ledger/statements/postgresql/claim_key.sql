-- Claim one key alone: the plain lock.
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
    -- A commit that is lost in a crash of the database may be lost only if the next fence, by the
    -- clock, is higher all the same, and if no former holder could commit then: the key was free.
    case
        when granted.fence = clock.now_us and coalesce(holder.owner, '') = ''
            then set_config('synchronous_commit', 'off', true)
    end as flush
from clock
left join granted on true
-- The key as it was before: this statement's own changes are not in its snapshot.
left join taskguard_keys holder on holder.key = %(key)s::text
