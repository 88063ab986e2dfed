-- A condition of `granted`: nobody who came before waits for the key, or was called just now.
and not exists (
    select from taskguard_work o
    left join taskguard_work mine on mine.id = %(work)s::text
    where o.key = %(key)s::text and o.parked is not null and o.state = 'NEW'
        and (o.due is null or (o.due > now_us and left(o.call, 8) <> '{"sent":'))
        -- Work that has begun is taken over before anybody's turn.
        and mine.state is distinct from 'PROCESSING'
        and (o.rank, o.parked) < (
            case when mine.state = 'NEW' and mine.parked is not null then mine.rank
                else %(rank)s::integer end,
            case when mine.state = 'NEW' and mine.parked is not null then mine.parked
                else 9223372036854775807 end
        )
)
