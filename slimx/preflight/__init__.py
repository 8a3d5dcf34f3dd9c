"""Questions to a configuration before any process of a run starts.

In: a configuration, the model's config.json, hooks, and this machine.
Out: the transport that is chosen, and refusals of what cannot work.
Read first: `checks/__init__.py`, then `probe.py`.
"""
