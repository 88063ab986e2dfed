-- Renews many shares. The arrays have one element for each share. Returns one letter for each share:
-- R: renewed, G: gone (the key has no holder), T: only other owners hold the key, S: another
-- transaction has locked its row.
create or replace function taskguard_locks_renew_shares_1(
    asked text[], owners text[], ttls_us bigint[]
) returns text
language plpgsql as $body$
declare
    now_us bigint; one record; l taskguard_locks%rowtype; answers text[];
begin
    for one in
        select * from unnest(asked, owners, ttls_us) with ordinality as u (key, me, ttl_us, number)
        order by u.key collate "C"
    loop
        select * into l from taskguard_locks k where k.key = one.key for update skip locked;
        now_us := extract(epoch from clock_timestamp()) * 1000000;
        if not found then
            answers[one.number] := case when exists (
                select from taskguard_locks k where k.key = one.key and k.until > now_us
            ) then 'S' else 'G' end;
        elsif left(l.owner, 1) = '{' and (l.owner::jsonb ->> one.me)::bigint > now_us then
            update taskguard_locks k set
                owner = (
                    l.owner::jsonb || jsonb_build_object(one.me, (now_us + one.ttl_us)::text)
                )::text,
                until = greatest(l.until, now_us + one.ttl_us)
            where k.key = one.key;
            answers[one.number] := 'R';
        else
            answers[one.number] := case when l.until > now_us then 'T' else 'G' end;
        end if;
    end loop;
    return array_to_string(answers, '');
end
$body$
