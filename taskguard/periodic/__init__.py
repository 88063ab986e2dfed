"""Leaders, and the names of ticks."""
