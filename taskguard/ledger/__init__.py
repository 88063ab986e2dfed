"""The ledger: the record of keys, work and messages, which decides which delivery takes effect.

`ports.py` has the protocols of a ledger, and `sql.py` the ledger on taskguard's own tables.
"""
