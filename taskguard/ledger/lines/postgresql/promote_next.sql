-- Promote the first message that waits for a key, if the key is free and no other message is expected.
-- Not flushed: a message that is promoted twice is claimed once. Conditions on the state of a line are
-- a CASE that is not NULL, because the planner has no estimate for that. Without statistics it expects
-- few rows of other conditions, and would sort all waiting messages instead of reading the index in
-- order. No other condition may imply that a position is not NULL. If statistics are older than the
-- line, the planner takes the index of lines for empty, and would read all of it to find any row.
with clock as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true),
        set_config('synchronous_commit', 'off', true)
),
head as materialized (
    select w.id, w.rank, w.parked
    from taskguard_work w
    where w.key = %(key)s::text and w.parked is not null
        and case when w.line = 'waiting' then 1 end is not null
    order by w.rank, w.parked
    limit 1
),
promoted as (
    update taskguard_work w set
        line = case when w.strict = 1 then 'kept' else 'promoted' end,
        due = clock.now_us + %(expected_us)s::bigint
    from head, clock
    where w.id = head.id and w.line = 'waiting' and w.parked is not distinct from head.parked
        and coalesce(w.call::json ->> 'app', '') = %(app)s::text
        and (%(queues)s::jsonb is null or %(queues)s::jsonb ? (w.call::json ->> 'queue'))
        and not exists (
            select from taskguard_keys k
            where k.key = %(key)s::text and k.lease_until > clock.now_us
        )
        and not exists (
            select from taskguard_work o
            where o.key = %(key)s::text and o.line = 'promoted'
                and o.due > (select now_us from clock)
                -- Work that is due much later was enqueued: there may be many, and none counts.
                and o.due < (select now_us from clock) + %(expected_us)s::bigint + 60000000
        )
        -- Strict work before it must have ended.
        and (
            select o.parked from taskguard_work o
            where o.key = %(key)s::text and o.parked is not null
                and (o.rank, o.parked) < (head.rank, head.parked)
                and case when o.line = 'kept' then 1 end is not null
            order by o.rank, o.parked
            limit 1
        ) is null
    returning w.id, w.task, w.message, w.retries, w.call, w.due, w.attempts, w.sends
)
select promoted.*, m.retries, m.deferrals
from promoted
left join taskguard_messages m
    on m.message = promoted.call::json ->> 'message' and m.work = promoted.id
