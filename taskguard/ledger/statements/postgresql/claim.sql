-- Claim one key and one work. The rule in `found.eligible` and in the last WHERE is
-- states.decide(); the contract suite compares the two.
--
-- `found` reads the snapshot from before any wait for a row lock. Only the WHERE of a DO UPDATE
-- sees the newest row, so it decides. If it grants the key but not the work, this claim has lost a
-- race, and the caller looks again. It also looks again if the work now belongs to another message:
-- it checks under the lock whether that message has superseded this one.
with clock as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true)
),
found as materialized (
    select
        clock.now_us,
        coalesce(m.retries, 0) as recorded_retries,
        coalesce(m.deferrals, 0) as recorded_deferrals,
        w.id, w.message, w.retries, w.state, w.final, w.fence, w.owner, w.lease_until,
        w.attempts, w.crashes, w.progress, w.result, w.error, w.finished, w.fingerprint,
        w.line, w.trace,
        case
            when w.state = 'PROCESSING' and w.owner = %(owner)s::text then true
            when w.message <> %(message)s::text
                and w.fingerprint <> %(fingerprint)s::text then false
            when w.state in ('DONE', 'DEAD') or (w.state = 'FAILED' and w.final = 1) then false
            when (%(retries)s::integer, %(deferrals)s::integer)
                < (coalesce(m.retries, 0), coalesce(m.deferrals, 0)) then false
            when w.id is null then %(may_create)s::boolean
            when w.message = %(message)s::text and %(retries)s::integer < w.retries then false
            when w.state <> 'PROCESSING' then true
            else w.lease_until <= clock.now_us and w.crashes + 1 < %(max_crashes)s::integer
        end as eligible
    from clock
    left join taskguard_work w on w.id = %(work)s::text
    left join taskguard_messages m on m.message = %(message)s::text and m.work = %(work)s::text
),
--| own_row_locked
granted as (
    insert into taskguard_keys as k (key, fence, owner, lease_until, works)
    select
        %(key)s::text, now_us, %(owner)s::text, now_us + %(ttl_us)s::bigint,
        %(work)s::text || E'\n'
    from found
    --| and_own_row
    where eligible
    --| in_line
    on conflict (key) do update set
        fence = case
            when k.owner = excluded.owner then k.fence
            else greatest(k.fence + 1, excluded.fence)
        end,
        owner = excluded.owner,
        lease_until = excluded.lease_until,
        works = case
            when starts_with(k.works, excluded.works) then k.works
            else left(
                excluded.works || coalesce(k.works, ''), greatest(400, length(excluded.works))
            )
        end
    where k.owner = excluded.owner or k.lease_until <= excluded.fence
    returning k.fence, k.owner, k.lease_until
),
claimed as (
    insert into taskguard_work as w (
        id, task, key, message, retries, state, final, fence, owner, lease_until,
        attempts, crashes, crashed_owner, fingerprint, call, due, created, started, trace
        --| position_columns
    )
    select
        %(work)s::text, %(task)s::text, %(key)s::text, %(message)s::text, %(retries)s::integer,
        'PROCESSING', 0, granted.fence, granted.owner, granted.lease_until,
        1, 0, '', %(fingerprint)s::text,
        %(call)s::text, case when %(call)s::text is not null then granted.lease_until end,
        found.now_us, found.now_us, %(trace)s::text
        --| position_values
    from granted, found
    on conflict (id) do update set
        message = excluded.message,
        retries = excluded.retries,
        state = excluded.state,
        final = 0,
        fence = excluded.fence,
        owner = excluded.owner,
        lease_until = excluded.lease_until,
        attempts = w.attempts
            + (w.state <> 'PROCESSING' or w.owner <> excluded.owner)::integer,
        crashes = w.crashes
            + (w.state = 'PROCESSING' and w.owner <> excluded.owner)::integer,
        crashed_owner = case
            when w.state = 'PROCESSING' and w.owner <> excluded.owner then w.owner
            else w.crashed_owner
        end,
        fingerprint = coalesce(excluded.fingerprint, w.fingerprint),
        call = coalesce(excluded.call, w.call),
        sends = null,
        due = case when coalesce(excluded.call, w.call) is not null then excluded.lease_until end,
        --| position
        started = excluded.started,
        trace = excluded.trace,
        error = null,
        -- `model/history.py` has the format of a line.
        history = case
            when w.state = 'PROCESSING' and w.owner <> excluded.owner then right(
                coalesce(w.history, '') || json_build_array(
                    excluded.created, 'takeover'::text, w.owner, w.fence, excluded.owner
                )::text || E'\n',
                4000
            )
            else w.history
        end,
        flag = null,
        since = null
    where case
        when w.state = 'PROCESSING' and w.owner = excluded.owner then true
        -- It was claimed under another key, or a clock was set back.
        when w.fence >= excluded.fence then false
        when w.message is distinct from (select message from found) then false
        when w.message <> excluded.message and w.fingerprint <> excluded.fingerprint then false
        when w.state in ('DONE', 'DEAD') or (w.state = 'FAILED' and w.final = 1) then false
        when w.message = excluded.message and excluded.retries < w.retries then false
        when w.state <> 'PROCESSING' then true
        else w.lease_until <= excluded.created and w.crashes + 1 < %(max_crashes)s::integer
    end
    returning w.attempts, w.crashes, w.progress
)
--| own_row_moved
select
    found.*,
    granted.fence as granted_fence,
    claimed.attempts as claimed_attempts,
    claimed.crashes as claimed_crashes,
    claimed.progress as claimed_progress,
    holder.owner as holder,
    holder.lease_until as held_until,
    -- Do not flush this commit if losing it in a crash of the database does no harm. The fence must
    -- be the time, so that the next fence is higher anyway. And the key must have been free, so
    -- that no former holder can commit.
    case
        when granted.fence = found.now_us and coalesce(holder.owner, '') = ''
            then set_config('synchronous_commit', 'off', true)
    end as flush
from found
left join granted on true
left join claimed on true
-- The key as it was before: this statement does not see its own changes.
left join taskguard_keys holder on holder.key = %(key)s::text
