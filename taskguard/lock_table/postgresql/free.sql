-- Frees the keys that the owner still holds. Returns how many.
-- One statement is enough: other processes only set `wanted_until` in such a row, and an update that
-- waited for that reads the new version. It notifies only if a process waits, because PostgreSQL runs
-- commits with notifications one after the other. A row with a token stays: the next token must be
-- higher. The commit does not wait for the disk: if a crash undoes the release, the lease expires.
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
