-- PROCESSING -> DONE while key and work both still carry this claim's fence and owner; the key
-- first, as everybody does. One row if done, none if the claim is stale; a transaction is then
-- rolled back, and alone all that stays is that the key of a body that has ended is free.
with
--| own_row_locked
ended as (
    update taskguard_keys set owner = '', lease_until = 0
    --| from_own_row
    where key = %(key)s::text and fence = %(fence)s::bigint and owner = %(owner)s::text
    returning key
),
finished as (
    update taskguard_work w set
        state = 'DONE',
        result = %(result)s::text,
        lease_until = 0,
        call = null,
        due = null,
        --| no_position
        finished = (extract(epoch from clock_timestamp()) * 1000000)::bigint
    from ended
    where w.id = %(work)s::text and w.state = 'PROCESSING'
        and w.fence = %(fence)s::bigint and w.owner = %(owner)s::text
        -- Alone, or in the transaction that the holder's began: no COMMIT came between.
        and (not %(begun)s::boolean or current_setting('taskguard.transaction', true) = 'begun')
    returning 1 as done
)
--| own_row_moved
select 1 from finished
--| and_moved
--| or_error
