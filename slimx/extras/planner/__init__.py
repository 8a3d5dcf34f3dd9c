"""Plans of runs: layout, memory, batches and publications, computed from a configuration and the model's
config.json."""
