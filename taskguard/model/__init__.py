"""Values and pure tables that every other room uses. Nothing here calls a server."""
