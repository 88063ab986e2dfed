-- As free.sql, of one key without a token: a row for each that was freed. By an equal sign, for a
-- list is planned anew whenever it is asked for, which takes as long as all else.
delete from taskguard_locks l
where l.key = %(key)s::text and l.owner = %(owner)s::text
    and l.until > extract(epoch from clock_timestamp()) * 1000000 and l.fence = 0
returning
    set_config('synchronous_commit', 'off', true),
    case
        when l.wanted_until > extract(epoch from clock_timestamp()) * 1000000
        then pg_notify('taskguard_locks', left(l.key, 1000))::text
    end
