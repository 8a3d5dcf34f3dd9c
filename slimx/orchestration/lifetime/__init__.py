"""Start and stop of the driver process of a run: signals, deadlines for stopping, and cleanup after a killed driver."""
