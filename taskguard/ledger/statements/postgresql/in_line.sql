-- A condition of `granted`: nobody who goes before waits for the key, was called just now, or keeps
-- his place (strict) until his work has ended.
and not exists (
    select from taskguard_work o
    left join taskguard_work mine on mine.id = %(work)s::text
    where o.key = %(key)s::text and o.parked is not null
        and case
            when o.strict = 1 then o.state in ('NEW', 'PROCESSING', 'FAILED')
            when o.state <> 'NEW' then false
            else o.due is null or (o.due > now_us and left(o.call, 8) <> '{"sent":')
        end
        -- Work that has begun is taken over before anybody's turn.
        and mine.state is distinct from 'PROCESSING'
        and (o.rank, o.parked) < (
            case when mine.parked is not null then mine.rank else %(rank)s::integer end,
            coalesce(mine.parked, 9223372036854775807)
        )
)
