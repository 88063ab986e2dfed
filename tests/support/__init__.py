"""Helpers of several tests: waiting for conditions, and others."""
