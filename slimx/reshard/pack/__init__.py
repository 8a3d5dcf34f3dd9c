"""Executes a plan: packs the trainer ranks' parameters and gathers them in buckets."""

PORTION = 256 * 2**20
"""Size in bytes of the GPU buffer that a rank uses to pack data for host memory: data is packed and copied one portion
of this size at a time."""
