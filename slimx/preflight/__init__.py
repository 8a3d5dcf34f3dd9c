"""Checks and predictions made before a process is started: memory, layouts, publication, effects of settings."""
