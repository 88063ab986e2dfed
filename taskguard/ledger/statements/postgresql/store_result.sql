-- Store the result of a work that this claim completed. A crash of the database may lose it, as may
-- a crash of the worker just before. So its commit need not be flushed.
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
