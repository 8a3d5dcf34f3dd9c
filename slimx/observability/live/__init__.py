"""A run as it goes on: activity, terminal, lock."""
