"""Runs micro-batches through the pipeline stages: forward only to compute log-probs, or forward and backward to
accumulate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from slimx.adapters.megatron.activation_offload import offloading
from slimx.algorithms.inputs import Loss, LossInputs, SequenceSum, TopLogprobs
from slimx.data.batch import MicroBatch
from slimx.data.columns import LOSS_COLUMNS
from slimx.models.layer_kind import Packing
from slimx.trainer.context import to_device
from slimx.trainer.model.logprobs import KeptTokens, Targets
from slimx.trainer.moe.routing import Routing


class TokenScores(NamedTuple):
    """Log-prob and entropy of every label of one micro-batch, each fp32 [T]."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Entropy, in nats, of the distribution from which the label's log-prob was computed."""


Output = tuple[torch.Tensor, ...]
"""Output tensors of the model, as returned by `label_logprobs`: log-probs, entropies, and optionally the log-probs of
additional tokens (`Targets.top`)."""
Trained = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Metrics that the loss computed for a micro-batch, and the policy's log-probs, [T]."""


def sum_gradients(model: list[DistributedDataParallel], num_tokens: object = None, **kwargs: object) -> None:
    """Sums gradients over ranks. megatron-core would also divide the sums by the number of tokens, but the token
    weights in the loss already include this division."""
    finalize_model_grads(model, None, **kwargs)


class Pipeline:
    """Runs forward and backward passes of one model over a list of micro-batches.

    With context parallelism, micro-batches contain only this rank's tokens (`ContextShard`), T is their number, and
    only `lengths` refers to the full sequences."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        device: torch.device,
        routing: Routing | None = None,
        sequence_sum: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] | None = None,
    ):
        """Prepares the passes. `chunks`: this rank's modules in the order of the forward pass. `routing`: their
        routers; None (for a critic) if routers choose by themselves and nothing is recorded. `sequence_sum`: function
        that sums per-token values over packed sequences of given lengths, for losses (`ContextShard.sequence_sum`)."""
        self.chunks = chunks
        self.device = device
        self._routing = routing
        self._sequence_sum = sequence_sum
        self._run = get_forward_backward_func()

    def scores(self, batches: list[MicroBatch], packings: Sequence[Packing] | None = None) -> list[TokenScores]:
        """Returns for each micro-batch the log-probs of the labels, and the entropies of the distributions that predict
        them, with the current weights; [] except on the last pipeline stage. `packings`: see `train`."""

        def collect(batch: MicroBatch, output: Output) -> tuple[torch.Tensor, torch.Tensor, TokenScores]:
            logprobs, entropy = output
            return logprobs.sum(), torch.zeros((), dtype=torch.int), TokenScores(logprobs, entropy)

        with torch.no_grad():
            return self._schedule(batches, collect, packings, forward_only=True)

    def train(
        self,
        batches: list[MicroBatch],
        loss: Loss,
        others: Sequence[dict[str, torch.Tensor]],
        packings: Sequence[Packing] | None = None,
    ) -> list[Trained]:
        """Runs forward and backward passes, which add to the gradients. Returns the metrics of the loss and the
        policy's log-probs for each micro-batch; [] except on the last pipeline stage.

        `others`: for each micro-batch, fields of `LossInputs` from earlier forward passes, by name; used on the last
        pipeline stage. `packings`: for each micro-batch, a function that creates its PackedSeqParams. Layers record
        discrete choices there, such as the tokens that sparse attention selects, or reuse those that an earlier pass
        recorded. None if layers choose again in every pass."""
        earlier = iter(others)

        def compute(batch: MicroBatch, output: Output) -> tuple[torch.Tensor, torch.Tensor, Trained]:
            logprobs, entropy, *top = output
            columns = self._columns(batch)
            inputs = LossInputs(
                **{"old_logprobs": columns["rollout_logprobs"], **columns, **next(earlier)},
                logprobs=logprobs,
                entropy=entropy,
                top=self._top_logprobs(batch, top),
                sequence_sum=self._sum_over(batch.lengths),
            )
            total, metrics = loss(inputs)
            return total, torch.zeros((), dtype=torch.int), (metrics, logprobs.detach())

        return self._schedule(batches, compute, packings, forward_only=False)

    def _sum_over(self, lengths: Sequence[int]) -> SequenceSum | None:
        sequence_sum = self._sequence_sum
        if sequence_sum is None:
            return None
        return lambda values: sequence_sum(values, lengths)

    def _top_logprobs(self, batch: MicroBatch, outputs: Sequence[torch.Tensor]) -> TopLogprobs | None:
        if not outputs:
            return None
        assert batch.teacher_top_logprobs is not None
        policy, policy_rest = outputs
        return TopLogprobs(policy, policy_rest, self._tensor(batch.teacher_top_logprobs))

    def _schedule[Output, Result](
        self,
        batches: list[MicroBatch],
        loss: Callable[[MicroBatch, Output], tuple[torch.Tensor, torch.Tensor, Result]],
        packings: Sequence[Packing] | None = None,
        *,
        forward_only: bool,
    ) -> list[Result]:
        inputs = list(zip(batches, packings or [PackedSeqParams] * len(batches), strict=True))
        # Each chunk needs an iterator over the micro-batches. megatron-core expects lists only for several chunks.
        model: object = self.chunks
        data: object = [iter(inputs) for _ in self.chunks]
        if len(self.chunks) == 1:
            model = self.chunks[0]
            data = iter(inputs)
        with offloading(get_model_config(self.chunks[0]), training=not forward_only):
            return self._run(
                forward_step_func=partial(self._forward, loss, training=not forward_only),
                data_iterator=data,
                model=model,
                num_microbatches=len(batches),
                seq_length=max(len(batch.tokens) for batch in batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _forward[Output, Result](
        self,
        loss: Callable[[MicroBatch, Output], Result],
        batches: Iterator[tuple[MicroBatch, Packing]],
        model: DistributedDataParallel,
        *,
        training: bool,
    ) -> tuple[Output, Callable[[Output], Result]]:
        batch, packing = next(batches)
        # Only learned position embeddings would use these; rotary embeddings use the sequence bounds.
        positions = torch.zeros(1, len(batch.tokens), dtype=torch.int64, device=self.device)
        bounds = self._tensor(np.cumsum([0, *batch.lengths], dtype=np.int32))
        packed = packing(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(batch.lengths),
            max_seqlen_kv=max(batch.lengths),
        )
        support = None if batch.support is None else KeptTokens(batch.support, self.device)
        targets = Targets(
            labels=self._tensor(batch.labels),
            temperature=self._tensor(batch.temperature),
            support=support,
            top=self._optional(batch.teacher_top_ids) if training else None,
        )
        # Weights of the labels in the loss of multi-token prediction layers (slimx.trainer.model.policy_model).
        options: dict[str, object] = {"loss_mask": self._tensor(batch.weight).unsqueeze(0)} if training else {}
        if batch.images is not None:
            options["images"] = batch.images
        with nullcontext() if self._routing is None else self._routing.microbatch(self.chunks.index(model)):
            output = model(
                self._tensor(batch.tokens).unsqueeze(0),
                positions,
                None,
                packed_seq_params=packed,
                labels=targets,
                **options,
            )
        return output, partial(loss, batch)

    def _columns(self, batch: MicroBatch) -> dict[str, Any]:
        """Returns the micro-batch's `LossColumns` fields as tensors on the device; None for a field that it does not
        have."""
        return {name: self._optional(getattr(batch, name)) for name in LOSS_COLUMNS}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)

    def _optional(self, array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else self._tensor(array)
