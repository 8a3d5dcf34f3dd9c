"""Gathers updated weights from data-parallel ranks during the forward pass that first reads them.

    update   every rank has new values of its shard of each bucket
    pass     layer 1 waits for its buckets | layer 1, bucket of layer 2 in flight | layer 2, ...

megatron-core 0.19.2 waits before each module's forward method for that module's own parameters. This misses weights
that other code reads: the output layer's, with which slimx computes log-probs itself, or those of a Mamba-2 layer's
convolution. Here each decoder layer waits for all its weights before it runs, and the model waits for the weights of
the modules after the decoder once the decoder has run.

Only a forward pass may read weights, unless `gather` has been called since the update. All ranks of a pipeline stage
must run the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel

if TYPE_CHECKING:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup


def wait_by_layer(chunk: DistributedDataParallel, model: GPTModel) -> None:
    """Replaces megatron-core's per-module hooks with hooks that wait for gathered parameters once per decoder layer,
    once for the embedding, and once for the modules after the decoder. `chunk`: the DistributedDataParallel wrapper
    around `model`."""
    chunk.disable_forward_pre_hook(param_sync=False)
    decoder = model.decoder

    def waiting(parts: list[torch.nn.Module]) -> Callable[..., None]:
        groups: dict[_ParamAndGradBucketGroup, None] = {}
        for part in parts:
            for parameter in part.parameters():
                if parameter.requires_grad:
                    groups[chunk.param_to_bucket_group[parameter]] = None

        def wait(*_: object) -> None:
            for group in groups:
                group.finish_param_sync()

        return wait

    after = []
    for name, part in model.named_children():
        if name == "embedding":
            part.register_forward_pre_hook(waiting([part]))
        elif name != "decoder":
            after.append(part)
    for part in decoder.layers:
        part.register_forward_pre_hook(waiting([part]))
    for name, part in decoder.named_children():
        if name != "layers":
            part.register_forward_pre_hook(waiting([part]))
    decoder.register_forward_hook(waiting(after))


@torch.no_grad()
def gather(chunks: Iterable[DistributedDataParallel]) -> None:
    """Gathers the updated weights on every rank now, instead of during the next forward pass. Collective over the
    data-parallel ranks."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
