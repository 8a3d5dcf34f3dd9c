"""Scheduling of the groups in progress: admission, interruption, rewards, and replay of saved batches."""
