"""Who may win: the record, in a database, of keys, work and messages.

`ports.py` says what a ledger does; `sql.py` is the one on taskguard's own tables.
"""
