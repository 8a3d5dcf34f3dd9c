"""The configuration: typed sections, read from YAML and overrides.

In: a YAML file, overrides such as `trainer.tensor=2`, and sections and rules of extras.
Out: a `Config` that breaks no rule, or a refusal of all that is wrong, with nearest names.
Read first: `schema.py`, then a section in `sections/`; `rule.py` for rules between keys.
"""
