"""Who should try: lock servers that keep most duplicates away from the database.

No correctness rests on this package when a ledger is configured. `base.py` says what a
provider does; every provider passes the contract suite on its real server.
"""
