"""Holders' transactions: one core, and an adapter for each thing that one may be on.

Read first: `core.py`.
"""
