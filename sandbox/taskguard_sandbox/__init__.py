"""The developers' sandbox: private real servers and workers, the demo, the servers of the examples.

It is in no wheel, and nothing that is installed imports it. `servers.py` and `workers.py` guarantee
that what they start is gone when its starter is, however that ends.
"""
