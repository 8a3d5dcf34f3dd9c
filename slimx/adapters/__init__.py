"""Adapters to upstreams: every change that slimx makes to megatron-core, SGLang, Ray and transformers.

In: an upstream package at the version that each file names.
Out: the package changed as each file describes, with the reason, only in the process that installs the adapter.
Read first: `megatron/layers.py` for trainers, `sglang/plugin.py` for engines.
"""
