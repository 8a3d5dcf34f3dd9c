"""Beginning and end of a run: signals, watchdog, and what a killed run leaves behind."""
