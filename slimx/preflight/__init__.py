"""Questions to a model, hooks and this machine before any process of a run starts.

In: a configuration, the model's config.json, hooks, and this machine.
Out: facts for the rules (`slimx/rules/`), the transport that is chosen, and refusals of hooks that cannot work.
Read first: `facts.py`, then `probe.py`.
"""
