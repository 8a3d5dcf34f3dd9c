"""Installs exact mode in SGLang's servers."""

ATTENTION = "slimx_exact"
"""Name under which exact mode's attention backend is registered with SGLang."""
