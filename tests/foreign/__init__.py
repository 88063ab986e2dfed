"""Celery's and RQ's own test suites, run as they are and with everything guarded.

    make foreign
    make foreign SUITE=rq

Whatever passes there without a guard has to pass with one; `expected.toml` lists what does not, and
why. The suites come with the source distributions of the versions that are installed
(`sources.py`), `running.py` runs one of them, `guard_celery.py` and `guard_rq.py` guard what it
runs, and `__main__.py` compares.
"""
