"""Plans of runs: their layout, memory, batches and publications, computed from the configuration alone."""
