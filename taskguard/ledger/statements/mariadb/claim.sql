-- Claim one key and one new work. The statement grants a claim if states.decide() says CREATE. The
-- contract suite compares the two.
--
-- The first half only reads, without locks. If the work has a record, the caller decides. The
-- second half locks the rows, and decides from them. If another claim has just created the work, it
-- returns no row, and the caller looks again. No transaction is open at the end, even after an
-- error.
--
-- Texts are compared with columns, never with variables, because variables have another collation.
begin not atomic
    declare known, mine boolean;
    declare recorded_retries, recorded_deferrals int;
    declare last_fence, held_until, now_us, granted_fence bigint;
    -- Another claim, under another key, has created the work.
    declare exit handler for 1062 rollback;
    declare exit handler for sqlexception begin rollback; resignal; end;

    select count(*) into known from taskguard_work where id = %(work)s;

    if known or not %(may_create)s then
        select coalesce(max(retries), 0), coalesce(max(deferrals), 0)
        into recorded_retries, recorded_deferrals
        from taskguard_messages where message = %(message)s and work = %(work)s;
        select
            timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)), null, owner, lease_until,
            recorded_retries, recorded_deferrals,
            state, final, message, retries, fence, crashes, fingerprint, result, error, finished,
            trace
        from taskguard_work where id = %(work)s;
        rollback;
    else
        insert into taskguard_keys (`key`, fence, owner, lease_until)
        values (%(key)s, 0, '', 0)
        on duplicate key update `key` = `key`;
        select fence, lease_until, owner = %(owner)s into last_fence, held_until, mine
        from taskguard_keys where `key` = %(key)s for update;
        select count(*) into known from taskguard_work where id = %(work)s for update;
        select coalesce(max(retries), 0), coalesce(max(deferrals), 0)
        into recorded_retries, recorded_deferrals
        from taskguard_messages where message = %(message)s and work = %(work)s;
        -- A separate statement, because the time must be read after all waits for row locks.
        set now_us = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));

        if known or mine then
            rollback;
        elseif (%(retries)s, %(deferrals)s) < (recorded_retries, recorded_deferrals) then
            select now_us, null, null, null, recorded_retries, recorded_deferrals;
            rollback;
        elseif held_until <= now_us then
            set granted_fence = greatest(now_us, last_fence + 1);
            update taskguard_keys
            set
                fence = granted_fence, owner = %(owner)s, lease_until = now_us + %(ttl_us)s,
                works = case
                    when left(works, char_length(%(line)s)) = %(line)s then works
                    else left(
                        concat(%(line)s, coalesce(works, '')),
                        greatest(400, char_length(%(line)s))
                    )
                end
            where `key` = %(key)s and fence = last_fence and lease_until = held_until;
            insert into taskguard_work (
                id, task, `key`, message, retries, state, final, fence, owner, lease_until,
                attempts, crashes, crashed_owner, fingerprint, `call`, due, created, started, trace
            )
            values (
                %(work)s, %(task)s, %(key)s, %(message)s, %(retries)s,
                'PROCESSING', 0, granted_fence, %(owner)s, now_us + %(ttl_us)s,
                1, 0, '', %(fingerprint)s, %(call)s,
                case when %(recoverable)s then now_us + %(ttl_us)s end, now_us, now_us, %(trace)s
            );
            commit;
            select now_us, granted_fence;
        else
            select now_us, null, owner, lease_until from taskguard_keys where `key` = %(key)s;
            rollback;
        end if;
    end if;
end
