"""`make demo`: orders by Celery and invoices by RQ, delivered three times each, under fire.

    python -m taskguard_sandbox.demo [--data orders.csv]

Real servers, real workers; in each queue one worker child is killed in its body and one is stopped
beyond its lease and let go on. Every effect is a row in a table *without* a unique index, so that
a double one would be seen. Guarantees: the exit status is 0 only if every order and every invoice
has one effect and every message was answered; the counts are exact; nothing is left behind.

Read next: `scenario.py` (what happens, in order), `orders.py` and `invoices.py` (the tasks),
`faults.py` (which process is killed, and when), `tally.py` (what is counted), `recording.py` (the
picture in the README).
"""
