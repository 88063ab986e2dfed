-- Read the isolation level of the user's open transaction, and whether it sees the claim. Also set
-- the time limits of a holder's transaction.
select
    upper(current_setting('transaction_isolation')),
    exists (
        select from taskguard_work w
        where w.id = %(work)s::text and w.state = 'PROCESSING'
            and w.fence = %(fence)s::bigint and w.owner = %(owner)s::text
    ),
    --| bounds
