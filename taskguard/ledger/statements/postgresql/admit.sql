-- On an open transaction of the user's own: its isolation level, and whether it sees the claim. From
-- here on it has the bounds of a holder's.
select
    upper(current_setting('transaction_isolation')),
    exists (
        select from taskguard_work w
        where w.id = %(work)s::text and w.state = 'PROCESSING'
            and w.fence = %(fence)s::bigint and w.owner = %(owner)s::text
    ),
    --| bounds
