"""Exact mode: trainer and engines compute the same bits."""
