"""State of a run that outlives its processes: checkpoints, and the records in the run's directory."""
