"""Executes a plan: gathers pieces from ranks into buckets."""

PORTION = 256 * 2**20
"""Bytes that a rank packs on its GPU at once before they are copied to host memory."""
