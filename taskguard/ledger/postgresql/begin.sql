-- First in a holder's transaction: a frozen holder's row locks end with its idle transaction, and
-- an obviously stale claim is refused before its body writes anything. Nothing is locked.
select
    set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, true),
    case when current_setting('server_version_num')::integer >= 140000
        then set_config('client_connection_check_interval', %(check_ms)s::text, true)
    end,
    exists (
        select from taskguard_works
        where id = %(work)s::text and state = 'PROCESSING'
            and fence = %(fence)s::bigint and owner = %(owner)s::text
    ) as standing
