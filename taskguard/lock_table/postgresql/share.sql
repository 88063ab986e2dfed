-- Takes a share of a key for one owner if fewer than `most` owners hold it. If the owner has a share
-- already, it gets the same grant again. The row's owner is then a JSON object: the end of the lease
-- for each owner. Returns the token, or the holder and how long it keeps the key. One transaction.
create or replace function taskguard_locks_share_1(
    asked text, me text, ttl_us bigint, fenced boolean, waits_us bigint, most bigint,
    out token bigint, out holder text, out left_us bigint
) language plpgsql as $body$
declare
    now_us bigint; l taskguard_locks%rowtype; shares jsonb; first_us bigint; last_us bigint;
begin
    loop
        insert into taskguard_locks (key, owner, until, fence, wanted_until)
        values (asked, '', 0, 0, 0) on conflict do nothing;
        select * into l from taskguard_locks k where k.key = asked for update;
        exit when found;
    end loop;
    now_us := extract(epoch from clock_timestamp()) * 1000000;
    select coalesce(jsonb_object_agg(s.key, s.value), '{}'), min(s.value::bigint)
    into shares, first_us
    from jsonb_each_text(case when left(l.owner, 1) = '{' then l.owner else '{}' end::jsonb) s
    where s.value::bigint > now_us;

    if left(l.owner, 1) <> '{' and l.until > now_us then
        left_us := l.until - now_us;
    elsif not shares ? me and (select count(*) from jsonb_object_keys(shares)) >= most then
        left_us := first_us - now_us;
    end if;
    if left_us is not null then
        holder := l.owner;
        if waits_us > 0 and l.wanted_until < now_us + waits_us / 2 then
            update taskguard_locks k set wanted_until = now_us + waits_us where k.key = asked;
        end if;
        return;
    end if;

    token := case
        when not fenced then 0
        when shares = '{}' or l.fence = 0 then greatest(l.fence + 1, now_us)
        else l.fence
    end;
    shares := shares || jsonb_build_object(me, (now_us + ttl_us)::text);
    select max(s.value::bigint) into last_us from jsonb_each_text(shares) s;
    update taskguard_locks k
    set owner = shares::text, until = last_us, fence = greatest(k.fence, token)
    where k.key = asked;
end
$body$
