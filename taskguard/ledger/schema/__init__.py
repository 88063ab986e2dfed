"""How the tables change, who may use them, and whose database they are in."""
