"""Checks of a machine, a node and a run's configuration before a run starts."""
