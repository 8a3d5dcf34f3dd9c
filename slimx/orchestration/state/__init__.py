"""State that outlives a process: checkpoints and the record of a run."""
