"""Direct transport: every trainer rank writes what an engine needs of it into memory beside that engine, over NIXL."""
