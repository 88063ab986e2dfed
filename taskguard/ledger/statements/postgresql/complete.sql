-- PROCESSING -> DONE if both key and work still have this claim's fence and owner. The key comes
-- first, as in every transaction. The statement returns one row if it completed the work, and none
-- if the claim is stale. Then the caller rolls back the transaction. If the statement ran alone, it
-- may have freed the key of the stale claim, which does no harm because the body has ended.
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
        flag = null,
        since = null,
        --| no_position
        finished = (extract(epoch from clock_timestamp()) * 1000000)::bigint
    from ended
    where w.id = %(work)s::text and w.state = 'PROCESSING'
        and w.fence = %(fence)s::bigint and w.owner = %(owner)s::text
        -- With `begun`, only in the holder's transaction: no COMMIT came in between.
        and (not %(begun)s::boolean or current_setting('taskguard.transaction', true) = 'begun')
    returning 1 as done
)
--| own_row_moved
select 1 from finished
--| and_moved
--| or_error
