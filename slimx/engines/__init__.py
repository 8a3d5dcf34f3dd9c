"""Inference engines: SGLang servers, the fleet of them behind a router, and weight transports to them.

In: `rollout.engines`, and buckets of weights with their version.
Out: servers that respond with verified weights and are restarted when lost.
Read first: `server/engine.py` for one engine, `fleet/membership.py` for all.
"""
