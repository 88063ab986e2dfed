"""What helps tests: private real servers (`servers`), and the demo.

Nothing here is needed by production code, and nothing in production code imports it.
"""
