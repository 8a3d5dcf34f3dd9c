"""Transports of packed buckets: memory, GPU memory, networks and files."""
