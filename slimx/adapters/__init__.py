"""Adapters to upstreams: every change that slimx makes to megatron-core, SGLang, Ray and transformers.

In: an upstream at the version that the file names, and the reason for the change.
Out: the upstream with that change, in the process that installs the adapter and in no other.
Read first: `megatron/layers.py` for trainers, `sglang/plugin.py` for engines.
"""
