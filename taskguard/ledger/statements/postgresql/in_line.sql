-- A condition of `granted`: nobody who goes before waits for the key, was called just now, or keeps
-- his place (strict) until his work has ended. In order, for the first is mostly one who waits: an
-- EXISTS would look through all of them.
and (
    select 1 from taskguard_work o
    where o.key = %(key)s::text and o.parked is not null
        and case
            when o.strict = 1 then o.state in ('NEW', 'PROCESSING', 'FAILED')
            when o.state <> 'NEW' then false
            else o.due is null or (o.due > now_us and left(o.call, 8) <> '{"sent":')
        end
        and (o.rank, o.parked) < (
            coalesce(
                (
                    -- Work that has begun is taken over before anybody's turn. A place in the line is
                    -- that of one message: another one of its work stands behind it.
                    select case
                        when mine.state = 'PROCESSING' then -2147483648
                        when mine.parked is not null and mine.message = %(message)s::text
                            then mine.rank
                    end
                    from taskguard_work mine
                    where mine.id = %(work)s::text
                ),
                %(rank)s::integer
            ),
            coalesce(
                (
                    select mine.parked from taskguard_work mine
                    where mine.id = %(work)s::text and mine.message = %(message)s::text
                ),
                9223372036854775807
            )
        )
    order by o.rank, o.parked
    limit 1
) is null
