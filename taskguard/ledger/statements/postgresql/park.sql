-- Store work with its call in the line of its key: NEW, at the end, or in the place that it has. No
-- row: it runs, has ended for good, or another message stands for it.
with asked as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true)
)
insert into taskguard_work as w (
    id, task, key, message, retries, state, final, fence, owner, lease_until,
    attempts, crashes, crashed_owner, fingerprint, call, parked, created
)
select
    %(work)s::text, %(task)s::text, %(key)s::text, %(message)s::text, %(retries)s::integer,
    'NEW', 0, 0, '', 0,
    0, 0, '', %(fingerprint)s::text, %(call)s::text, least(%(sent_us)s::bigint, now_us), now_us
from asked
on conflict (id) do update set
    key = excluded.key,
    message = excluded.message,
    retries = excluded.retries,
    state = excluded.state,
    owner = excluded.owner,
    lease_until = excluded.lease_until,
    call = excluded.call,
    due = null,
    parked = case
        when w.state = 'NEW' then coalesce(w.parked, excluded.parked)
        else excluded.created
    end,
    error = null,
    finished = null
where (
        (w.state = 'NEW' and (w.call is null or w.message = excluded.message))
        or (w.state = 'FAILED' and w.final = 0)
    )
    and not (w.message = excluded.message and w.retries > excluded.retries)
returning 1
