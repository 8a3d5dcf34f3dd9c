"""Memory of trainer ranks, engine ranks, publications and hosts, computed from the configuration."""
