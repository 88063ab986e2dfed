"""A Django app with orders."""
