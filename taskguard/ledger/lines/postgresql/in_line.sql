-- A condition of `granted`: nobody who goes before waits for the key, was called just now, or keeps
-- his place (strict) until his work has ended. The first of them, by the index, and not EXISTS, for
-- which the planner collects the whole line; as it does for any condition that it takes for rare,
-- which it does not of something that is not NULL.
and (
    select o.parked from taskguard_work o
    where o.key = %(key)s::text and o.parked is not null
        and nullif(case o.line
            when 'waiting' then true
            when 'kept' then true
            -- Of this very work the message that waits is expected until it was sent again:
            -- nothing else answers it.
            when 'promoted' then o.due > now_us or o.id = %(work)s::text
            when 'expired' then o.id = %(work)s::text
        end, false) is not null
        -- Work that has begun is taken over before anybody's turn. A place in the line is that of
        -- one message: another one of its work stands behind it, whatever its rank, as long as
        -- nothing else answers the one that waits.
        and (o.rank, o.parked) < (
            coalesce(
                (
                    select case
                        when mine.state = 'PROCESSING' then -2147483648
                        when mine.message = %(message)s::text and mine.line is not null
                            then mine.rank
                        when mine.line in ('waiting', 'promoted', 'expired')
                            or (mine.line = 'kept' and mine.state = 'NEW' and mine.sends is null)
                            then 2147483647
                    end
                    from taskguard_work mine
                    where mine.id = %(work)s::text
                ),
                %(rank)s::integer
            ),
            coalesce(
                (
                    select case
                        when mine.state = 'PROCESSING' then 0
                        when mine.message = %(message)s::text then mine.parked
                    end
                    from taskguard_work mine
                    where mine.id = %(work)s::text
                ),
                9223372036854775807
            )
        )
    order by o.rank, o.parked
    limit 1
) is null
