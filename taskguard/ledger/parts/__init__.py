"""The parts of a `SqlLedger`: one for each protocol of `ledger/ports.py`, which says what it does.

Guarantees: a call that may be asked again is `@retried`, where it is defined and nowhere else. No
part knows another one.
"""
