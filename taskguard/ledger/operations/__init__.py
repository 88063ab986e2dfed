"""SQL of operators: what they change, pause and ask."""
