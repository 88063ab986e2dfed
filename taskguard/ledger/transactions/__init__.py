"""Holders' transactions: one core, and an adapter for each kind of connection.

Read first: `core.py`.
"""
