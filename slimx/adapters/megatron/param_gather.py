"""This adapter gathers updated weights from data-parallel ranks beside the forward pass that is the first to read them.

    update   every rank has new values of its share of each bucket
    pass     layer 1 waits for its buckets | layer 1, bucket of layer 2 under way | layer 2, ...

megatron-core 0.19.2 waits in every module for the parameters of this module alone, before its forward method. It misses
weights that something else reads: the output layer's, of which slimx makes log-probs itself, or those of a Mamba-2
layer's convolution. Here a layer waits for all that is in it, and what follows the decoder for all that is there.

Nothing but a forward pass may read weights before `gather`. Every rank of a pipeline stage takes the same passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


def wait_by_layer(chunk: DistributedDataParallel, model: torch.nn.Module) -> None:
    """Have the parts of `model`, which `chunk` wraps, wait for their weights in place of megatron-core's hooks."""
    chunk.disable_forward_pre_hook(param_sync=False)
    decoder = model.decoder

    def waiting(parts: list[torch.nn.Module]) -> Any:
        groups = {chunk.param_to_bucket_group[p]: None for part in parts for p in part.parameters() if p.requires_grad}

        def wait(*_: Any) -> None:
            for group in groups:
                group.finish_param_sync()

        return wait

    others = [part for name, part in decoder.named_children() if name != "layers"]
    before = [part for name, part in model.named_children() if name == "embedding"]
    for part in (*before, *decoder.layers, *others):
        part.register_forward_pre_hook(waiting([part]))
    behind = [part for name, part in model.named_children() if name not in ("embedding", "decoder")]
    decoder.register_forward_hook(waiting(behind))


@torch.no_grad()
def gather(chunks: Iterable[DistributedDataParallel]) -> None:
    """Make the weights whole on every rank, where passes wait for them. Collective."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
