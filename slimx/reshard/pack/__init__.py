"""Execution of a plan: pieces gathered from ranks into buckets."""

PORTION = 256 * 2**20
"""Bytes that a rank packs on its GPU at once on their way to host memory."""
