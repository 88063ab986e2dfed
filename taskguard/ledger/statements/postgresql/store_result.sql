-- The result of a work that is DONE by this claim. It may be lost in a crash of the database, as
-- it is in a crash of the worker just before: so its commit need not be flushed.
with clock as materialized (
    select
        set_config('lock_timeout', %(lock_timeout)s::text, true),
        set_config('synchronous_commit', 'off', true)
)
update taskguard_work w set result = %(result)s::text
from clock
where w.id = %(work)s::text and w.state = 'DONE'
    and w.fence = %(fence)s::bigint and w.owner = %(owner)s::text
returning 1
