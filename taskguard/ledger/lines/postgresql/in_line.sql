-- A condition of `granted`: no message that goes before waits for the key, was promoted a moment ago,
-- or is strict and has not ended. The subquery reads the first of these by the index. For EXISTS, and
-- for a condition that it takes for rare, the planner would collect the whole line. It does not take
-- `is not null` for rare.
and (
    select o.parked from taskguard_work o
    where o.key = %(key)s::text and o.parked is not null
        and nullif(case o.line
            when 'waiting' then true
            when 'kept' then true
            -- A waiting message of the same work is expected until it was sent again, because no
            -- other delivery answers it.
            when 'promoted' then o.due > now_us or o.id = %(work)s::text
            when 'expired' then o.id = %(work)s::text
        end, false) is not null
        -- Work that has begun is taken over out of turn. A position belongs to one message. Another
        -- message of the same work goes behind it, whatever its rank, as long as no other delivery
        -- answers the one that waits.
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
