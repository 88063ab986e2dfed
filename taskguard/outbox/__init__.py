"""Messages that the ledger stores: enqueued with a transaction, swept, or promoted from a line."""
