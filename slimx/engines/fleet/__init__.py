"""All engines of a run: their Ray actors, which of them serve, and their restarts."""
