-- complete.sql in a transaction of its own, which this statement commits or rolls back.
begin not atomic
    declare done int default 0;
    declare exit handler for sqlexception begin rollback; resignal; end;

    update taskguard_keys set owner = '', lease_until = 0
    where `key` = %(key)s and fence = %(fence)s and owner = %(owner)s;

    if row_count() = 1 then
        update taskguard_work set
            state = 'DONE',
            result = %(result)s,
            lease_until = 0,
            `call` = null,
            due = null,
            flag = null,
            since = null,
            finished = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
        where id = %(work)s and state = 'PROCESSING'
            and fence = %(fence)s and owner = %(owner)s;
        set done = row_count();
    end if;

    if done = 1 then
        commit;
    else
        rollback;
    end if;
    select done;
end
