"""Celery's and RQ's own test suites, run without guards and with every task guarded.

    make foreign
    make foreign SUITE=rq

A test that passes without guards must pass with them. `expected.toml` lists the exceptions and
their reasons. The suites come with the source distributions of the installed versions
(`sources.py`). `running.py` runs one of them, `guard_celery.py` and `guard_rq.py` guard what it
runs, and `__main__.py` compares.
"""
