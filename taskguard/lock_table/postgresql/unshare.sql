-- Ends an owner's share of a key, and notifies waiters. Returns whether the owner had a share.
-- The commit does not wait for the disk: if a crash undoes the release, the lease expires.
create or replace function taskguard_locks_unshare_1(asked text, me text) returns boolean
language plpgsql as $body$
declare
    now_us bigint; l taskguard_locks%rowtype; shares jsonb; last_us bigint;
begin
    perform set_config('synchronous_commit', 'off', true);
    select * into l from taskguard_locks k
    where k.key = asked and left(k.owner, 1) = '{' for update;
    now_us := extract(epoch from clock_timestamp()) * 1000000;
    if not found or coalesce((l.owner::jsonb ->> me)::bigint, 0) <= now_us then
        return false;
    end if;
    select jsonb_object_agg(s.key, s.value), max(s.value::bigint) into shares, last_us
    from jsonb_each_text(l.owner::jsonb) s
    where s.key <> me and s.value::bigint > now_us;
    update taskguard_locks k set owner = coalesce(shares::text, ''), until = coalesce(last_us, 0)
    where k.key = asked;
    if l.wanted_until > now_us then
        perform pg_notify('taskguard_locks', left(asked, 1000));
    end if;
    return true;
end
$body$
