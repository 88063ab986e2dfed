-- free_one.sql for a key with a token. Its row stays.
update taskguard_locks l set owner = '', until = 0
where l.key = %(key)s::text and l.owner = %(owner)s::text
    and l.until > extract(epoch from clock_timestamp()) * 1000000 and l.fence > 0
returning
    set_config('synchronous_commit', 'off', true),
    case
        when l.wanted_until > extract(epoch from clock_timestamp()) * 1000000
        then pg_notify('taskguard_locks', left(l.key, 1000))::text
    end
