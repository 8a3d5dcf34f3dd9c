"""Executes a plan: packs the trainer ranks' parameters and gathers them in buckets."""

PORTION = 256 * 2**20
"""Size in bytes of the portions in which a rank packs data on the GPU and copies it to host memory."""
