"""Memory and devices of a trainer rank."""
