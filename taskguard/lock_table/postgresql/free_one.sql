-- free.sql for one key without a token. Returns a row if the key was freed.
-- It compares with `=` because PostgreSQL plans `= any (...)` anew for each call, which takes as long
-- as the rest of the statement.
delete from taskguard_locks l
where l.key = %(key)s::text and l.owner = %(owner)s::text
    and l.until > extract(epoch from clock_timestamp()) * 1000000 and l.fence = 0
returning
    set_config('synchronous_commit', 'off', true),
    case
        when l.wanted_until > extract(epoch from clock_timestamp()) * 1000000
        then pg_notify('taskguard_locks', left(l.key, 1000))::text
    end
