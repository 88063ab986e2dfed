"""The parts of a `SqlLedger`, one for each protocol of `ledger/ports.py`, which documents it.

Guarantees: a call that is safe to repeat is `@retried` at its definition, and nowhere else. No part
knows another one.
"""
