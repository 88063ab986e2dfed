-- The same on an Engine of the user's own, first in its transaction.
select
    set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, true),
    set_config('client_connection_check_interval', %(check_ms)s::text, true)
