"""Checks and readings before anything of a run is started."""
