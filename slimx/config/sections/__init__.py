"""Sections of a configuration, a file for each or for those that belong together: keys, types, bounds, defaults."""
