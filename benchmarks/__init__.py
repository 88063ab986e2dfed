"""The figures of the README: `make bench`, or `python -m benchmarks locks guarded …`.

Each figure compares with a peer and with the hand-written optimum, in the same process and in
turns, so that a noisy machine is noisy for all of them. Times are of this machine; what counts
are the ratios.
"""
