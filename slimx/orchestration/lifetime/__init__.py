"""Start and end of a run's driver: signals, watchdog, and cleanup after a killed run."""
