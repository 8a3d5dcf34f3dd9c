"""HTTP servers and clients that trust nobody: bounded connections, bodies and redirects."""
