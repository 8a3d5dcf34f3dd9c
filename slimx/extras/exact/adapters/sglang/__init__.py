"""Exact mode inside SGLang."""

ATTENTION = "slimx_exact"
"""Name of the attention backend."""
