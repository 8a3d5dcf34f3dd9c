"""Sections of a configuration: keys, types, bounds and defaults. A section has its own file, or is in `general.py`.
`engines.py` and `objectives.py` have parts of several sections."""
