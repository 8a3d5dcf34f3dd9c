"""The configuration of a run: typed sections, read from a YAML file and command-line overrides.

In: a YAML file, overrides such as `trainer.tensor=2`, and the sections and rules that extras add.
Out: a validated `Config`, or one error that lists every fault and suggests the nearest known names.
Read first: `schema.py`, then a section in `sections/`; `rule.py` for rules between keys.
"""
