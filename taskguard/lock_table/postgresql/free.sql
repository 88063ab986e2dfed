-- Frees the keys that are still the owner's, and answers how many those were. Nobody else changes
-- such a row but to leave a waiter's mark, which a change that met it reads anew: so one statement is
-- enough, and no function. Only where somebody waits it sends a notification: one in every
-- commit would let them pass one after the other. A row with a token stays, for the next one has to be
-- higher. The commit waits for no disk: a release that a crash undoes ends with its lease.
with asked as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('synchronous_commit', 'off', true)
),
gone as (
    delete from taskguard_locks l using asked
    where l.key = any (%(keys)s::text[]) and l.owner = %(owner)s::text
        and l.until > asked.now_us and l.fence = 0
    returning l.key, l.wanted_until > asked.now_us as is_wanted
),
kept as (
    update taskguard_locks l set owner = '', until = 0 from asked
    where l.key = any (%(keys)s::text[]) and l.owner = %(owner)s::text
        and l.until > asked.now_us and l.fence > 0
    returning l.key, l.wanted_until > asked.now_us as is_wanted
)
select
    count(*),
    count(case when l.is_wanted then pg_notify('taskguard_locks', left(l.key, 1000))::text end)
from (select * from gone union all select * from kept) l
