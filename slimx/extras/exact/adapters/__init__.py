"""Exact mode inside megatron-core and SGLang."""
