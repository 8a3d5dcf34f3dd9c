"""Persistent state of a run: checkpoints and records."""
