"""megatron-core's fine-grained activation offloading for training passes that differ from step to step.

Upstream (0.19.2, `megatron.core.pipeline_parallel.fine_grained_activation_offload`) records the order of micro-batches
and model chunks in the first pass of the process and assumes the same order in every later pass. In a run, however,
passes without gradients come first and in between, the number of micro-batches changes, and a critic alternates with
the policy. A longer pass would keep the activations of the micro-batches that the first pass did not have, and an
evaluation before the first training pass would leave chunks whose backward pass never runs. Pinned buffers are cached
by shape, and packed micro-batches have a new shape at nearly every step. Therefore each training pass is treated as the
first, and passes without gradients offload nothing.

Upstream also frees the storage of offloaded tensors even if other tensors share it. The value tensor is a view of the
fused QKV projection's output, and the query norm saves another view of that output for its backward pass, which would
then read freed memory. Here the memory is freed only when no tensor refers to it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.pipeline_parallel import fine_grained_activation_offload as upstream
from megatron.core.transformer import TransformerConfig


@contextmanager
def offloading(transformer: TransformerConfig, *, training: bool) -> Iterator[None]:
    """Prepares one pass over the micro-batches of a model with configuration `transformer`; the pass must run inside
    the block. If `training`, the pass offloads activations, as if it were the process's first pass; otherwise it
    offloads none. Does nothing if the configuration does not enable offloading."""
    if not transformer.fine_grained_activation_offloading:
        yield
        return
    _forget()
    transformer.fine_grained_activation_offloading = training  # read by GPTModel and by the schedule
    handler = upstream.ChunkOffloadHandler
    summary = upstream.print_offload_summary_table
    move = handler.bulk_offload
    handler.bulk_offload = lambda chunk, name, _: move(chunk, name, [])
    upstream.print_offload_summary_table = lambda _: None  # upstream's runs a collective and prints after every pass
    try:
        yield
    finally:
        handler.bulk_offload = move
        upstream.print_offload_summary_table = summary
        transformer.fine_grained_activation_offloading = True


def _forget() -> None:
    """Resets upstream's offload manager, so that it treats the next pass as the first. CUDA streams are kept; pinned
    buffers return to torch's allocator."""
    manager = upstream.PipelineOffloadManager.get_instance()
    for cache in (manager._queue, manager._cached_chunks_forward, manager._cached_chunks_backward):
        cache.clear()
    manager._cpu_tensor_pool._pools.clear()
    manager._stages = None
    manager._offload_margin = 0
    manager._is_warmup = True
    manager.reset()
