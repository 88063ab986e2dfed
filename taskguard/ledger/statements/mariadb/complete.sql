-- PROCESSING -> DONE while key and work both still carry this claim's fence and owner; the key
-- first, as everybody does. It answers how many records of work are done,
-- or nothing, if the key is not this claim's; the transaction goes on, and is to be rolled back where that is not one.
-- It fails if the body's transaction has ended: its savepoint is not there. Then it is set anew, for
-- who asks why nothing was completed.
--
-- Without variables: a body may have changed its session to sql_mode = 'ORACLE', which declares
-- them elsewhere.
begin not atomic
    update taskguard_keys set owner = '', lease_until = 0
    where `key` = %(key)s and fence = %(fence)s and owner = %(owner)s;

    if row_count() = 1 then
        release savepoint taskguard;
        savepoint taskguard;
        update taskguard_work set
            state = 'DONE',
            result = %(result)s,
            lease_until = 0,
            `call` = null,
            due = null,
            finished = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
        where id = %(work)s and state = 'PROCESSING'
            and fence = %(fence)s and owner = %(owner)s;
        select row_count();
    end if;
end
