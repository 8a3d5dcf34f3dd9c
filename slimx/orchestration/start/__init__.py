"""Checks of a run before any part of it starts, and reading of the inputs of its rollouts."""
