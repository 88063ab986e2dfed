"""What several tests use: waiting on conditions, and more beside it."""
