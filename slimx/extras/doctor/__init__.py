"""Checks of a machine, of a node and of a run's configuration before the run starts."""
