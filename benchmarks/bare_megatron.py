"""A training loop of megatron-core alone: its GPTModel, its data parallelism, its pipeline schedule, its optimizer.

It takes the micro-batches that slimx packed, as tensors that lie ready, and computes the same loss. It leaves out what
slimx adds: routes, log-prob gap, metrics, learning rate, log-probs in chunks.

torch and megatron-core are imported inside the methods: slimx's adapters must be in force first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slimx.data.batch import MicroBatch


@dataclass(slots=True)
class PackedTensors:
    """One packed micro-batch as tensors [1, T]."""

    tokens: Any
    positions: Any
    labels: Any
    weight: Any
    advantages: Any
    old_logprobs: Any
    packed: Any
    """Megatron's PackedSeqParams."""


class BareMegatron:
    """Model and optimizer of a configuration with the weights of the same checkpoint. Supports sampling temperature 1,
    one pipeline stage and no context parallelism."""

    def __init__(self, config: Any, spec: Any, parallel: Any):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from slimx.layout.megatron import MegatronLayout
        from slimx.trainer.device.backends import choose_backends
        from slimx.trainer.model.transformer import transformer_config
        from slimx.trainer.model.weights import Weights
        from slimx.trainer.step.forward_backward import sum_gradients

        backends = choose_backends(config.trainer, device="cpu", packages=())
        transformer = transformer_config(spec, config, backends, cpu=True)
        # megatron-core's own, but for the chunk rule of delta nets, which it has on CUDA alone.
        layers = spec.layer_kind.decoder_spec(transformer, None)
        model = GPTModel(transformer, layers, **spec.gpt)
        Weights([model], spec, MegatronLayout(spec.table, parallel.sizes), parallel.rank).load(config.initial_weights)
        self.model = DistributedDataParallel(
            transformer,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            model,
        )
        options = config.trainer.optimizer
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.betas[0],
                adam_beta2=options.betas[1],
                adam_eps=options.eps,
                clip_grad=options.clip_grad,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        transformer.finalize_model_grads_func = sum_gradients
        transformer.grad_scale_func = self.optimizer.scale_loss
        self.algorithm = config.algorithm
        self._batches: list[PackedTensors] = []

    def hold(self, batches: Sequence[MicroBatch]) -> None:
        """Stores a data-parallel rank's micro-batches for `step`."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        self._batches = []
        for batch in batches:
            bounds = torch.tensor([0, *batch.lengths]).cumsum(0).to(torch.int32)
            longest = max(batch.lengths)
            self._batches.append(
                PackedTensors(
                    tokens=torch.tensor(batch.tokens)[None],
                    positions=torch.cat([torch.arange(length) for length in batch.lengths])[None],
                    labels=torch.tensor(batch.labels)[None],
                    weight=torch.tensor(batch.weight)[None],
                    advantages=torch.tensor(batch.advantages)[None],
                    old_logprobs=torch.tensor(batch.rollout_logprobs)[None],
                    packed=PackedSeqParams(
                        qkv_format="thd",
                        cu_seqlens_q=bounds,
                        cu_seqlens_kv=bounds,
                        max_seqlen_q=longest,
                        max_seqlen_kv=longest,
                    ),
                )
            )

    def step(self) -> float:
        """Runs forward, backward and optimizer step on the stored micro-batches; returns the gradient norm."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(self._batches),
            model=self.model,
            num_microbatches=len(self._batches),
            seq_length=max(batch.tokens.shape[1] for batch in self._batches),
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def _forward(self, batches: Iterator[PackedTensors], model: Any) -> tuple[Any, Any]:
        import torch

        batch = next(batches)

        def grpo(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            # Old log-probs stand for sampled tokens only.
            ratio = torch.where(batch.weight > 0, -losses - batch.old_logprobs, 0.0).exp()
            clipped = ratio.clamp(1 - self.algorithm.loss.low, 1 + self.algorithm.loss.high)
            surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
            return -(batch.weight * surrogate).sum(), torch.zeros((), dtype=torch.int), {}

        output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
        return output, grpo
