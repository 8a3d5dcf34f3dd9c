"""Executes a plan: packs the trainer ranks' parameters and gathers them in buckets."""

PORTION = 256 * 2**20
"""Size in bytes of the GPU memory through which a rank packs data for host memory: the data is packed and copied in
portions of this size."""
