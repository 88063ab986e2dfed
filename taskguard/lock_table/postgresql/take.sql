-- Takes all keys for one owner, or none. If the owner has them already, it gets the same grant again.
-- Returns the token, or the first taken key, its holder and its remaining time. One transaction.
create or replace function taskguard_locks_take_1(
    asked text[], me text, ttl_us bigint, fenced boolean, waits_us bigint,
    out token bigint, out taken text, out holder text, out left_us bigint
) language plpgsql as $body$
declare
    now_us bigint; wanted bigint; there integer; mine integer; last bigint; is_taken boolean;
begin
    loop
        now_us := extract(epoch from clock_timestamp()) * 1000000;
        -- The usual case, one free key. A release deletes a row without a token and keeps the others.
        if cardinality(asked) = 1 and not fenced then
            insert into taskguard_locks (key, owner, until, fence, wanted_until)
            values (asked[1], me, now_us + ttl_us, 0, 0)
            on conflict (key) do nothing;
            if found then
                token := 0;
                return;
            end if;
        elsif cardinality(asked) = 1 then
            update taskguard_locks l set
                owner = me,
                until = now_us + ttl_us,
                fence = case
                    when l.owner = me and l.until > now_us and l.fence > 0 then l.fence
                    else greatest(l.fence + 1, now_us)
                end
            where l.key = asked[1] and (l.owner = me or l.until <= now_us)
            returning l.fence into token;
            if found then
                return;
            end if;
        end if;

        -- Most refusals need no row lock. A waiter sets `wanted_until` in the holder's row. If the
        -- holder released the key meanwhile, the loop starts again.
        select l.key, l.owner, l.until - now_us, l.wanted_until
        into taken, holder, left_us, wanted
        from taskguard_locks l
        where l.key = any (asked) and l.owner <> me and l.until > now_us
        order by l.key limit 1;
        if found then
            if waits_us > 0 and wanted < now_us + waits_us / 2 then
                update taskguard_locks l set wanted_until = now_us + waits_us
                where l.key = taken and l.owner = holder and l.until > now_us;
                continue when not found;
            end if;
            return;
        end if;

        if cardinality(asked) = 1 then
            insert into taskguard_locks as l (key, owner, until, fence, wanted_until)
            values (asked[1], me, now_us + ttl_us, case when fenced then now_us else 0 end, 0)
            on conflict (key) do update set
                owner = excluded.owner,
                until = excluded.until,
                fence = case
                    when not fenced then l.fence
                    when l.owner = me and l.until > now_us and l.fence > 0 then l.fence
                    else greatest(l.fence + 1, now_us)
                end
            where l.owner = me or l.until <= now_us
            returning l.fence into token;
            continue when not found;  -- another owner took the key meanwhile
            return;
        end if;

        -- Every call locks rows in the order of their keys, including new rows.
        insert into taskguard_locks (key, owner, until, fence, wanted_until)
        select k, '', 0, 0, 0 from unnest(asked) k order by k collate "C"
        on conflict do nothing;
        select
            count(*),
            count(*) filter (where l.owner = me and l.until > now_us),
            max(l.fence),
            bool_or(l.owner <> me and l.until > now_us)
        into there, mine, last, is_taken
        from (
            select * from taskguard_locks k where k.key = any (asked) order by k.key for update
        ) l;
        continue when is_taken or there < cardinality(asked);
        if not fenced then
            token := 0;
        elsif mine = there and last > 0 then
            token := last;
        else
            token := greatest(last + 1, now_us);
        end if;
        update taskguard_locks l
        set owner = me, until = now_us + ttl_us, fence = greatest(l.fence, token)
        where l.key = any (asked);
        return;
    end loop;
end
$body$
