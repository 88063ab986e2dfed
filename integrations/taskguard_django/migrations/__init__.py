"""Migrations of the ledger's tables."""
