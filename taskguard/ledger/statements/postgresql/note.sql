-- Store the progress of a work that this claim holds. This is one message, so that a holder that
-- freezes in between keeps no row locked. A crash of the database may lose the last progress.
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
