"""Examination of a machine, a node and a run's configuration before anything is started."""
