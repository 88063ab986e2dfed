-- Read what `claim.sql` reads, in its columns, without a claim. It shows why `claim_first.sql` did not
-- grant one, for a fraction of what `claim.sql` costs.
select
    (extract(epoch from clock_timestamp()) * 1000000)::bigint as now_us,
    coalesce(m.retries, 0),
    coalesce(m.deferrals, 0),
    w.id, w.message, w.retries, w.state, w.final, w.fence, w.owner, w.lease_until,
    w.attempts, w.crashes, w.progress, w.result, w.error, w.finished, w.fingerprint,
    w.line, w.trace,
    false, null::bigint, null::integer, null::integer, null::text,
    k.owner, k.lease_until, null::text
from (select) one
left join taskguard_work w on w.id = %(work)s::text
left join taskguard_messages m on m.message = %(message)s::text and m.work = %(work)s::text
left join taskguard_keys k on k.key = %(key)s::text
