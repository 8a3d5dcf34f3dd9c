"""Copies in fp8 that Transformer Engine keeps of weights from one micro-batch to the next.

megatron-core has them written anew in the first micro-batch of every pass, so one that is gone costs nothing; while
engines generate on the GPU it would cost memory. Written for Transformer Engine 2.20.2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def drop(chunks: Iterable[torch.nn.Module]) -> None:
    """Give back the memory of the copies in `chunks`."""
    for chunk in chunks:
        for module in chunk.modules():
            copies = getattr(module, "_fp8_workspaces", None)
            if copies:
                copies.clear()
