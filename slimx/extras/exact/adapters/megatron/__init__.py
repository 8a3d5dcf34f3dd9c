"""Exact mode inside megatron-core."""
