-- The same on an Engine of the user's own, first in its transaction. One round trip either way, so
-- an obviously stale claim is refused here as well.
select
    set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, true),
    case when current_setting('server_version_num')::integer >= 140000
        then set_config('client_connection_check_interval', %(check_ms)s::text, true)
    end
