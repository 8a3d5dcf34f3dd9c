"""Engines of a run: their Ray actors, their membership and their restarts."""
