"""A run in progress: activity, terminal, lock."""
