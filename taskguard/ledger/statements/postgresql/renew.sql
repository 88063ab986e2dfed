-- Renew many claims at once. A claim has as many rows in `mine` as it has keys, or records of its
-- work if those are more. It is renewed if all its keys and one record can be locked without a
-- wait. Otherwise another transaction is changing them, and the claim is skipped. Renewals of other
-- claims must not wait for that.
with clock as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true)
),
mine as materialized (
    select * from unnest(
        %(owners)s::text[], %(fences)s::bigint[], %(work_ids)s::text[],
        %(ttls_us)s::bigint[], %(keys)s::text[]
    ) as hold (owner, fence, work, ttl_us, key)
),
free as materialized (
    select k.key
    from taskguard_keys k
    join mine on mine.key = k.key and mine.owner = k.owner and mine.fence = k.fence
    order by k.key
    for update of k skip locked
),
free_works as materialized (
    select w.owner
    from taskguard_work w
    join mine on mine.work = w.id and mine.owner = w.owner and mine.fence = w.fence
    where w.state = 'PROCESSING'
    order by w.id
    for update of w skip locked
),
whole as materialized (
    select mine.owner
    from mine left join free on free.key = mine.key
    where mine.work is null or mine.owner in (select owner from free_works)
    group by mine.owner
    having count(free.key) = count(mine.key)
),
renewed_work as (
    update taskguard_work w set
        lease_until = clock.now_us + mine.ttl_us,
        due = case when w.due is not null then clock.now_us + mine.ttl_us end,
        -- This changes only at the first renewal, so that later ones stay HOT.
        flag = 1,
        since = w.started
    from clock, mine join whole on whole.owner = mine.owner
    where w.id = mine.work and w.state = 'PROCESSING'
        and w.fence = mine.fence and w.owner = mine.owner
    returning w.owner
),
keys as (
    update taskguard_keys k set lease_until = clock.now_us + mine.ttl_us
    from clock, mine join whole on whole.owner = mine.owner
    where k.key = mine.key
        and (mine.work is null or mine.owner in (select owner from renewed_work))
    returning k.owner
)
select
    mine.owner,
    w.state,
    bool_and(coalesce(k.owner = mine.owner and k.fence = mine.fence, false)) as is_current,
    mine.owner in (select owner from keys) as renewed
from mine
left join taskguard_work w on w.id = mine.work and w.owner = mine.owner
left join taskguard_keys k on k.key = mine.key
group by mine.owner, w.state
