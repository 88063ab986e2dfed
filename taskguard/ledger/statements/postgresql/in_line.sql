-- A condition of `granted`: nobody who came before waits for the key, or was called just now.
and not exists (
    select from taskguard_work o
    where o.key = %(key)s::text and o.parked is not null and o.state = 'NEW'
        and (o.due is null or (o.due > now_us and left(o.call, 8) <> '{"sent":'))
        and o.parked < coalesce(
            (
                -- Work that has begun is taken over before anybody's turn. A place in the line is
                -- that of one message: another one of its work stands behind it.
                select case
                    when mine.state = 'PROCESSING' then 0
                    when mine.state = 'NEW' and mine.message = %(message)s::text then mine.parked
                end
                from taskguard_work mine
                where mine.id = %(work)s::text
            ),
            9223372036854775807
        )
)
