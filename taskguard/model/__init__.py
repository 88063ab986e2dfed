"""Values and pure tables that every other package uses. Nothing here calls a server."""
