"""Rows of the user's own, whose state a work moves."""
