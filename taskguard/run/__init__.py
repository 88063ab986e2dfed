"""One delivery: from its claim to its outcome, with its guard, its lease and its line."""
