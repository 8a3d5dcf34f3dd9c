"""Checks of a run, and reading of its inputs, before any part of it starts."""
