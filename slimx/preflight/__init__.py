"""Checks of the model and the machine before any process of a run starts.

In: a configuration, the model's config.json, and the local machine.
Out: facts for the rules (`slimx/rules/`), and the transport of weights that the run uses.
Read first: `facts.py`, then `transport.py`.
"""
