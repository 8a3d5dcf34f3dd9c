"""Checks of a configuration that need the model."""
