"""Inference engines: SGLang servers, the fleet of them behind a router, and transports of weights to them.

In: `rollout.engines`, and buckets of weights with the version that they are of.
Out: servers that answer under verified weights, restarted when they are lost.
Read first: `server/engine.py` for one engine, `fleet/membership.py` for all.
"""
