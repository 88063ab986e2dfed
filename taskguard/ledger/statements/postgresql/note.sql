-- Progress of a work that this claim holds, by itself: one message, so that a holder that is frozen
-- in it keeps no row locked. What the last holder noted may be lost in a crash of the database.
with clock as materialized (
    select
        set_config('lock_timeout', %(lock_timeout)s::text, true),
        set_config('synchronous_commit', 'off', true)
)
update taskguard_work w set progress = %(progress)s::text
from clock
where w.id = %(work)s::text and w.state = 'PROCESSING'
    and w.fence = %(fence)s::bigint and w.owner = %(owner)s::text
returning 1
