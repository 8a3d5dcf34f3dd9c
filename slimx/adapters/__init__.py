"""Adapters to upstreams: every change that slimx makes to megatron-core, SGLang, Ray and transformers.

In: an upstream package at the version that each file names.
Out: the package, changed only in the process that installs the adapter; each file states its changes and why.
Read first: `megatron/layers.py` for trainers, `sglang/plugin.py` for engines.
"""
