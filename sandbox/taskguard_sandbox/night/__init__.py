"""A night with trouble: real workers that are killed, paused and requeued on purpose.

`python -m taskguard_sandbox.night` makes the page "At three in the morning" from it.
"""
