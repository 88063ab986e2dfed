"""Statements of the ledger for operators: questions, changes, and counts."""
