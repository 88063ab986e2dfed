"""Creation, upgrades and privileges of the ledger's tables, and the identity of the database."""
