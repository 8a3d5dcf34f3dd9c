"""Variables of NVSHMEM, on which DeepEP's kernels between nodes are built."""

from __future__ import annotations

NVSHMEM = {"NVSHMEM_DISABLE_NCCL": "1"}
"""Else it would make communicators of NCCL, which DeepEP does not use, on the memory of each GPU."""
