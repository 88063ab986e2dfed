-- Claim one key and one work that is new. The rule in `eligible` is states.decide(); the contract
-- suite compares the two.
--
-- The first half reads alone, without a lock: what is known is for the caller to judge. Only the
-- second decides, from rows nobody else can change; it says nothing where they are not as they
-- were, and the caller looks again. Nothing is open at the end, however it ends.
--
-- Texts are compared with columns, never with variables: those have a collation of their own.
begin not atomic
    declare eligible, mine boolean default false;
    declare last_fence, held_until, now_us, granted_fence bigint;
    declare exit handler for 1062 rollback;  -- under another key the work came first
    declare exit handler for sqlexception begin rollback; resignal; end;

    select %(may_create)s and w.id is null
        and (%(retries)s, %(copy)s) >= (coalesce(m.retries, 0), coalesce(m.`copy`, 0))
    into eligible
    from (select 1) one
    left join taskguard_works w on w.id = %(work)s
    left join taskguard_messages m on m.message = %(message)s;

    if not eligible then
        select
            timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)), null, null, null,
            coalesce(m.retries, 0), coalesce(m.`copy`, 0),
            w.id, w.message, w.retries, w.state, w.final, w.fence, w.owner, w.lease_until,
            w.attempts, w.crashes, w.progress, w.result, w.error, w.finished, w.fingerprint
        from (select 1) one
        left join taskguard_works w on w.id = %(work)s
        left join taskguard_messages m on m.message = %(message)s;
        rollback;
    else
        insert into taskguard_keys (`key`, fence, owner, lease_until)
        values (%(key)s, 0, '', 0)
        on duplicate key update `key` = `key`;

        select fence, lease_until, owner = %(owner)s into last_fence, held_until, mine
        from taskguard_keys where `key` = %(key)s for update;

        select w.id is null
            and (%(retries)s, %(copy)s) >= (
                coalesce((select retries from taskguard_messages where message = %(message)s), 0),
                coalesce((select `copy` from taskguard_messages where message = %(message)s), 0)
            )
        into eligible
        from (select 1) one
        left join taskguard_works w on w.id = %(work)s
        for update;

        -- In a statement of its own: after all waiting for row locks.
        set now_us = timestampdiff(microsecond, '1970-01-01', utc_timestamp(6));

        if eligible and not mine and held_until <= now_us then
            set granted_fence = greatest(now_us, last_fence + 1);

            update taskguard_keys
            set fence = granted_fence, owner = %(owner)s, lease_until = now_us + %(ttl_us)s
            where `key` = %(key)s and fence = last_fence and lease_until = held_until;

            insert into taskguard_works (
                id, task, `key`, message, retries, state, final, fence, owner, lease_until,
                attempts, crashes, crashed_owner, fingerprint, `call`, due, created, started
            )
            values (
                %(work)s, %(task)s, %(key)s, %(message)s, %(retries)s,
                'PROCESSING', 0, granted_fence, %(owner)s, now_us + %(ttl_us)s,
                1, 0, '', %(fingerprint)s, %(call)s,
                case when %(call)s is not null then now_us + %(ttl_us)s end, now_us, now_us
            );
            commit;
            select now_us, granted_fence;
        elseif eligible and not mine then
            select now_us, null, owner, lease_until from taskguard_keys where `key` = %(key)s;
            rollback;
        else
            rollback;
        end if;
    end if;
end
