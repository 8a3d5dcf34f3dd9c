"""The trainer without slimx: a plain megatron-core training step, on the model and optimizer of slimx's own ranks.

It takes the same packed micro-batches, but as tensors that lie ready in each rank's process, and it computes the same
loss. It leaves out what slimx adds: the batch's way through Ray, routes, log-prob gap, metrics, learning rate.

torch and megatron-core are imported inside the methods: Ray imports this file before slimx's adapters are in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimx.trainer.worker import TrainerWorker


@dataclass(slots=True)
class Held:
    """One packed micro-batch as tensors [T]."""

    tokens: Any
    positions: Any
    labels: Any
    temperature: Any
    weight: Any
    advantages: Any
    old_logprobs: Any
    packed: Any
    """Megatron's PackedSeqParams."""


class BareTrainerWorker(TrainerWorker):
    """slimx's trainer rank, with a training step of its own beside slimx's."""

    def hold(self, batches: Any) -> None:
        """Keep a data-parallel rank's micro-batches for `bare_step`."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        self._held = []
        for batch in batches:
            bounds = torch.tensor([0, *batch.lengths]).cumsum(0).to(torch.int32)
            longest = max(batch.lengths)
            self._held.append(
                Held(
                    tokens=torch.tensor(batch.tokens),
                    positions=torch.cat([torch.arange(length) for length in batch.lengths]),
                    labels=torch.tensor(batch.labels),
                    temperature=torch.tensor(batch.temperature),
                    weight=torch.tensor(batch.loss_weight),
                    advantages=torch.tensor(batch.advantages),
                    old_logprobs=torch.tensor(batch.rollout_logprobs),
                    packed=PackedSeqParams(
                        qkv_format="thd",
                        cu_seqlens_q=bounds,
                        cu_seqlens_kv=bounds,
                        max_seqlen_q=longest,
                        max_seqlen_kv=longest,
                    ),
                )
            )

    def bare_step(self) -> float:
        """Forward, backward and optimizer step on what is held; the gradient norm."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        model, optimizer = self._trainer.chunks[0], self._trainer.optimizer
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(self._held),
            model=model,
            num_microbatches=len(self._held),
            seq_length=max(len(batch.tokens) for batch in self._held),
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        return float(norm)

    def _forward(self, batches: Any, model: Any) -> tuple[Any, Any]:
        import torch
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        batch: Held = next(batches)
        algorithm = self._trainer.config.algorithm

        def grpo(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            logprobs = -vocab_parallel_cross_entropy(logits[0].float() / batch.temperature[:, None], batch.labels)
            # Old log-probs stand for sampled tokens only.
            ratio = torch.where(batch.weight > 0, logprobs - batch.old_logprobs, 0.0).exp()
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
            return -(batch.weight * surrogate).sum(), torch.zeros((), dtype=torch.int), {}

        output = model(batch.tokens[None], batch.positions[None], None, packed_seq_params=batch.packed)
        return output, grpo
