"""megatron-core's fine-grained activation offloading for training passes that differ from step to step.

Upstream (0.19.2, `megatron.core.pipeline_parallel.fine_grained_activation_offload`) learns the order of micro-batches
and parts from the first pass of the process and assumes it ever after. But in a run, passes without gradients come
first and in between, the number of micro-batches changes, and a critic alternates with the policy. A longer pass would
keep the activations of the micro-batches that the first one did not have, and an evaluation before it would leave
chunks whose backward pass never runs. Pinned buffers are cached by shape, and packed micro-batches have a new one at
nearly every step. So each training pass is treated as the first, and passes without gradients move nothing.

Upstream also empties the storage of moved tensors even if it is shared: values are a view of the product of all
queries, keys and values, from which the norm of queries keeps another view for its backward pass, which then reads
freed memory. Here memory is freed when nothing refers to it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.pipeline_parallel import fine_grained_activation_offload as upstream
from megatron.core.transformer import TransformerConfig


@contextmanager
def offloading(transformer: TransformerConfig, *, training: bool) -> Iterator[None]:
    """Wraps one pass over micro-batches of a model with this configuration."""
    if not transformer.fine_grained_activation_offloading:
        yield
        return
    _forget()
    transformer.fine_grained_activation_offloading = training  # read by GPTModel and by the schedule
    handler = upstream.ChunkOffloadHandler
    summary = upstream.print_offload_summary_table
    move = handler.bulk_offload
    handler.bulk_offload = lambda chunk, name, _: move(chunk, name, [])
    upstream.print_offload_summary_table = lambda _: None  # a collective and a print after every first pass
    try:
        yield
    finally:
        handler.bulk_offload = move
        upstream.print_offload_summary_table = summary
        transformer.fine_grained_activation_offloading = True


def _forget() -> None:
    """Makes the next pass the first one. Streams stay, and pinned buffers return to torch's allocator."""
    manager = upstream.PipelineOffloadManager.get_instance()
    for cache in (manager._queue, manager._cached_chunks_forward, manager._cached_chunks_backward):
        cache.clear()
    manager._cpu_tensor_pool._pools.clear()
    manager._stages = None
    manager._offload_margin = 0
    manager._is_warmup = True
    manager.reset()
