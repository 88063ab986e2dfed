"""Values and pure tables: what every other room speaks in. Nothing here asks a server."""
