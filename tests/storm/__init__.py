"""A storm over real workers: duplicates and faults of all kinds at random, and the history checked.

    make storm SECONDS=60 SEED=7

`app.py` and `adapters.py` run in the workers; `scenario.py` publishes and waits, `faults.py` breaks
things, `audit.py` has the database write down every change, `invariants.py` reads it all.
"""
