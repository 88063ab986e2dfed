-- Note that the first who waits for a key is called, if it is free and nobody else is expected.
-- Unflushed: who is called twice is claimed once.
with asked as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true),
        set_config('synchronous_commit', 'off', true)
),
head as materialized (
    select w.id, w.rank, w.parked
    from taskguard_work w
    where w.key = %(key)s::text and w.parked is not null and w.state = 'NEW' and w.due is null
    order by w.rank, w.parked, w.id
    limit 1
),
called as (
    update taskguard_work w set due = asked.now_us + %(expected_us)s::bigint
    from head, asked
    where w.id = head.id and w.state = 'NEW' and w.parked = head.parked and w.due is null
        and coalesce(w.call::json ->> 'app', '') = %(app)s::text
        and (%(queues)s::text[] is null or w.call::json ->> 'queue' = any(%(queues)s::text[]))
        and not exists (
            select from taskguard_keys k
            where k.key = %(key)s::text and k.lease_until > asked.now_us
        )
        and not exists (
            select from taskguard_work o
            where o.key = %(key)s::text and o.parked is not null and o.state = 'NEW'
                and o.strict is null and o.due > asked.now_us and left(o.call, 8) <> '{"sent":'
        )
        -- Nor who keeps his place before him until his work has ended.
        and not exists (
            select from taskguard_work o
            where o.key = %(key)s::text and o.parked is not null and o.strict = 1
                and o.due is not null and o.state in ('NEW', 'PROCESSING', 'FAILED')
                and (o.rank, o.parked) < (head.rank, head.parked)
        )
    returning w.id, w.task, w.message, w.retries, w.call, w.due, w.attempts
)
select called.*, m.retries, m.deferrals
from called
left join taskguard_messages m
    on m.message = called.call::json ->> 'message' and m.work = called.id
