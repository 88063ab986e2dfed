-- Store work with its call in the line of its key: NEW, at the end, or in the position that it has. No
-- row if the work is in progress, has ended for good, or has another message on record. No row either if
-- the message's call was replaced. With `only_new` no row if the work or its message is on record.
with clock as materialized (
    select
        (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
        set_config('lock_timeout', %(lock_timeout)s::text, true)
)
insert into taskguard_work as w (
    id, task, key, message, retries, state, final, fence, owner, lease_until,
    attempts, crashes, crashed_owner, fingerprint, call, line, rank, parked, strict, expires, created
)
select
    %(work)s::text, %(task)s::text, %(key)s::text, %(message)s::text, %(retries)s::integer,
    'NEW', 0, 0, '', 0,
    0, 0, '', %(fingerprint)s::text, %(call)s::text, 'waiting', %(rank)s::integer,
    least(%(sent_us)s::bigint, now_us), case when %(strict)s::boolean then 1 end,
    %(expires_us)s::bigint, now_us
from clock
where not %(only_new)s::boolean or not exists (
    select from taskguard_work where id = %(work)s::text
    union all
    select from taskguard_messages where message = %(message)s::text and work = %(work)s::text
)
on conflict (id) do update set
    key = excluded.key,
    message = excluded.message,
    retries = excluded.retries,
    state = excluded.state,
    owner = excluded.owner,
    lease_until = excluded.lease_until,
    call = excluded.call,
    sends = null,
    due = null,
    line = excluded.line,
    rank = excluded.rank,
    strict = excluded.strict,
    -- A message in line keeps its earliest expiry. least() ignores NULL.
    expires = case
        when w.state = 'NEW' and w.line is not null and w.message = excluded.message
            then least(w.expires, excluded.expires)
        else excluded.expires
    end,
    parked = coalesce(
        w.parked,
        -- A retry goes to the end, unless its work has kept its position.
        case when w.state = 'NEW' or excluded.strict = 1 then excluded.parked
            else excluded.created end
    ),
    error = null,
    flag = null,
    since = null,
    finished = null
where (
        (w.state = 'NEW' and (w.call is null or w.message = excluded.message))
        -- A position that was kept belongs to its message.
        or (w.state = 'FAILED' and w.final = 0 and (w.line is null or w.message = excluded.message))
    )
    and not (w.message = excluded.message and w.retries > excluded.retries)
    and not exists (
        select from taskguard_messages
        where message = %(message)s::text and work = %(work)s::text and retries = %(replaced)s::integer
    )
returning 1
