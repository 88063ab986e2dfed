-- Opens a holder's transaction in one round trip. A frozen holder's row locks end with its idle
-- transaction, and a statement that runs for a client that is gone ends, too.
begin;
set local idle_in_transaction_session_timeout = {idle_ms};
set local client_connection_check_interval = {check_ms}
