-- PROCESSING -> DONE if both key and work still have this claim's fence and owner. The key comes
-- first, as in every transaction.
--
-- The statement returns the number of records that became DONE, or no row if the key is not this
-- claim's. The transaction stays open. Unless the number is 1, the caller rolls it back.
--
-- If the body has ended its transaction, the savepoint is gone and the statement fails. Otherwise
-- it sets the savepoint again, because a later check for an ended transaction needs it.
--
-- It uses no variables: a body may have set sql_mode = 'ORACLE' in its session, and that mode
-- declares variables in another place.
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
            flag = null,
            since = null,
            finished = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))
        where id = %(work)s and state = 'PROCESSING'
            and fence = %(fence)s and owner = %(owner)s;
        select row_count();
    end if;
end
