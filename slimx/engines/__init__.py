"""Inference engines of a run: SGLang servers, the router in front of them, their recovery, and weight transports.

In: section `rollout.engines` of the configuration, and buckets of weights with their version.
Out: servers that respond with verified weights and are restarted after a failure.
Read first: `server/engine.py` for one engine, `fleet/membership.py` for all of them.
"""
