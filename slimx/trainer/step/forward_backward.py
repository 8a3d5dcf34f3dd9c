"""Runs micro-batches through the pipeline: forward only for log-probs, forward and backward for a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from slimx.adapters.megatron.activation_offload import offloading
from slimx.algorithms.inputs import Loss, LossInputs, TopLogprobs
from slimx.data.batch import MicroBatch
from slimx.data.columns import LOSS_COLUMNS
from slimx.models.layer_kind import Packing
from slimx.trainer.context import to_device
from slimx.trainer.model.logprobs import KeptTokens, Targets
from slimx.trainer.moe.routing import Routing


class TokenScores(NamedTuple):
    """Scores of every label of one micro-batch, each fp32 [T]."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Entropy of the distribution that the label is from, in nats."""


def sum_gradients(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over ranks as sums: megatron would divide by the token count, which the loss weights already
    hold."""
    finalize_model_grads(model, None, **kwargs)


class Pipeline:
    """One model's forward and backward over a list of micro-batches.

    Under context parallelism the micro-batches are this rank's part of each (`ContextShard`), T is its length, and only
    `lengths` tells of the whole."""

    def __init__(
        self,
        chunks: list[Any],
        device: torch.device,
        routing: Routing | None = None,
        sequence_sum: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] | None = None,
    ):
        """`chunks`: this rank's modules in the order of the forward pass. `routing`: of their routers; without one they
        choose by themselves (a critic's). `sequence_sum`: sums over the sequences of a pack, given its lengths, which
        losses want (`slimx.trainer.parallel`)."""
        self.chunks, self.device, self._routing, self._sequence_sum = chunks, device, routing, sequence_sum
        self._run = get_forward_backward_func()

    def scores(self, batches: list[MicroBatch], packings: Sequence[Packing] | None = None) -> list[TokenScores]:
        """Log-probs and entropies under the present weights, one pair per micro-batch; empty except on the last
        pipeline stage. `packings`: as `train` takes them."""

        def collect(batch: MicroBatch, output: TokenScores) -> tuple[torch.Tensor, torch.Tensor, TokenScores]:
            return output[0].sum(), torch.zeros((), dtype=torch.int), TokenScores(*output)

        with torch.no_grad():
            return self._schedule(batches, collect, packings, forward_only=True)

    def train(
        self,
        batches: list[MicroBatch],
        loss: Loss,
        others: Sequence[Mapping[str, torch.Tensor]],
        packings: Sequence[Packing] | None = None,
    ) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Accumulate gradients; per micro-batch the loss's metrics and the policy's log-probs [T] (last stage only).

        `others`: fields of `LossInputs` by name, per micro-batch: what earlier forward passes brought (last stage
        only). `packings`: makers of the micro-batches' bounds, on which layers record choices or repeat recorded ones;
        None: every pass chooses anew."""
        number = iter(range(len(batches)))

        def compute(batch: MicroBatch, output: TokenScores) -> tuple[torch.Tensor, torch.Tensor, Any]:
            logprobs, entropy, *top = output
            columns = self._columns(batch)
            scored = {"old_logprobs": columns["rollout_logprobs"]} | others[next(number)]
            inputs = LossInputs(
                **columns | scored,
                logprobs=logprobs,
                entropy=entropy,
                top=TopLogprobs(*top, self._tensor(batch.teacher_top_logprobs)) if top else None,
                sequence_sum=self._sequence_sum and partial(self._sequence_sum, lengths=batch.lengths),
            )
            total, metrics = loss(inputs)
            return total, torch.zeros((), dtype=torch.int), (metrics, logprobs.detach())

        return self._schedule(batches, compute, packings, forward_only=False)

    def _schedule(
        self,
        batches: list[MicroBatch],
        loss: Callable[..., Any],
        packings: Sequence[Packing] | None = None,
        *,
        forward_only: bool,
    ) -> list[Any]:
        fed = list(zip(batches, packings or [PackedSeqParams] * len(batches), strict=True))
        with offloading(get_model_config(self.chunks[0]), training=not forward_only):
            return self._run(
                forward_step_func=partial(self._forward, loss, training=not forward_only),
                # Each chunk reads the same micro-batches; a single one is not passed as a list.
                data_iterator=[iter(fed) for _ in self.chunks] if len(self.chunks) > 1 else iter(fed),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=max(len(batch.tokens) for batch in batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _forward(
        self,
        loss: Callable[..., Any],
        batches: Iterator[tuple[MicroBatch, Packing]],
        model: Any,
        *,
        training: bool,
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, packing = next(batches)
        # Only learned position embeddings would read them; rotary ones go by the bounds of the sequences.
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
        # What layers of multi-token prediction, if there are any, learn from (slimx.trainer.model.policy_model).
        learned = {"loss_mask": self._tensor(batch.weight).unsqueeze(0)} if training else {}
        with nullcontext() if self._routing is None else self._routing.microbatch(self.chunks.index(model)):
            output = model(
                self._tensor(batch.tokens).unsqueeze(0),
                positions,
                None,
                packed_seq_params=packed,
                labels=targets,
                **learned,
            )
        return output, partial(loss, batch)

    def _columns(self, batch: MicroBatch) -> dict[str, torch.Tensor | None]:
        """Fields of `LossColumns` on the device."""
        return {name: self._optional(getattr(batch, name)) for name in LOSS_COLUMNS}

    def _tensor(self, array: Any) -> torch.Tensor:
        return to_device(array, self.device)

    def _optional(self, array: Any) -> torch.Tensor | None:
        return None if array is None else self._tensor(array)
