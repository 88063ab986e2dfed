"""All SQL of waiting: the lines of keys, their states, and what moves a message in them."""
