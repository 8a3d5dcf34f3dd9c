"""Questions to a model and this machine before any process of a run starts.

In: a configuration, the model's config.json, and this machine.
Out: facts for the rules (`slimx/rules/`), and the transport that is chosen.
Read first: `facts.py`, then `transport.py`.
"""
