"""Rows of the user, whose state a work changes."""
