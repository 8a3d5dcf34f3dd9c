"""One rank's part of the critic: its value model, and what it can be asked to do. Every method is called on all of the
critic's ranks together, which may be those of the policy's trainer."""

from __future__ import annotations

import numpy as np
import torch

from slimx.algorithms.losses.value_loss import ValueInputs, ValueLoss, value_loss
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.layout.megatron import MegatronLayout
from slimx.models.trunk import read_trunk
from slimx.trainer.device.backends import choose_backends, installed
from slimx.trainer.model.build import build_model, unwrap
from slimx.trainer.model.value_model import ValueModel
from slimx.trainer.model.weights import Weights
from slimx.trainer.parallel import ParallelState
from slimx.trainer.step.forward_backward import Pipeline
from slimx.trainer.step.metrics import combine, reduce
from slimx.trainer.step.optimizer import build_optimizer, learning_rate
from slimx.trainer.step.optimizer_step import OptimizerStep
from slimx.trainer.trained import TrainedModel


class ValuePipeline(Pipeline):
    """A value model's forward and backward over a list of micro-batches."""

    def values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Value at every position, one [T] per micro-batch; empty except on the last pipeline stage."""

        def collect(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            values = output[0].float()
            return values.sum(), torch.zeros((), dtype=torch.int), values

        with torch.no_grad():
            return self._schedule(batches, collect, forward_only=True)

    def train_values(self, batches: list[MicroBatch], loss: ValueLoss) -> list[dict[str, torch.Tensor]]:
        """Accumulate gradients; per micro-batch the loss's metrics (last stage only)."""

        def compute(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            total, metrics = loss(
                ValueInputs(
                    values=output[0].float(),
                    weight=self._tensor(batch.loss_weight),
                    old_values=self._tensor(batch.values),
                    returns=self._tensor(batch.returns),
                )
            )
            return total, torch.zeros((), dtype=torch.int), metrics

        return self._schedule(batches, compute, forward_only=False)


class CriticTrainer(TrainedModel):
    """Value model, optimizer and pipeline of one rank."""

    def __init__(self, config: Config, parallel: ParallelState):
        """`config`: that of the run; `parallel`: the place of this rank among the critic's."""
        own = config.as_critic()
        trainer, critic = own.trainer, own.critic
        spec = read_trunk(config.model)
        backends = choose_backends(trainer, device=parallel.device.type, packages=installed(), experts=spec.experts)
        chunks = build_model(spec, own, backends, device=parallel.device, kind=ValueModel)
        modules = [unwrap(chunk) for chunk in chunks]
        heads = [module.value_head for module in modules if module.post_process]
        for head in heads:
            head.reset(critic.head, config.run.seed)
        layout = MegatronLayout(spec.table, parallel.sizes)
        weights = Weights(modules, spec, layout, parallel.rank, beside=_heads(modules))
        weights.load(own.initial_weights)
        options = trainer.optimizer
        undecayed = weights.matching(options.no_weight_decay, "critic.optimizer.no_weight_decay")
        holder = "critic" if critic.placement == "own" else "trainer"
        super().__init__(own, parallel, chunks, weights, build_optimizer(own, chunks, undecayed), holder)
        named = weights.trainable() | {f"value_head.{n}": p for head in heads for n, p in head.named_parameters()}
        self.optimizer_step = OptimizerStep(
            self.optimizer, options, named, parallel.host_group, key="critic.optimizer", metrics="critic"
        )
        self.loss = value_loss(clip=critic.value_clip)
        self.pipeline = ValuePipeline(self.chunks, parallel.device)

    def values(self, batches: list[MicroBatch]) -> list[np.ndarray]:
        """Value at every position, float32, one array [T] per micro-batch (last stage only)."""
        parts = self.pipeline.values(self._local(batches))
        if not self.parallel.last_stage:
            return []
        return [
            self.context.whole(part, batch.lengths).cpu().numpy() for part, batch in zip(parts, batches, strict=True)
        ]

    def train_updates(self, updates: list[list[MicroBatch]], *, step: int) -> dict[str, float]:
        """Run all updates of step `step` (from 0), one optimizer step for each list of micro-batches.

        Returns the metrics of them all."""
        done = step * len(updates)
        return combine([self.train_step(batches, step=done + number) for number, batches in enumerate(updates)])

    def train_step(self, batches: list[MicroBatch], *, step: int) -> dict[str, float]:
        """Run forward, backward and one optimizer step on this data-parallel rank's micro-batches, which carry `values`
        and `returns`.

        `step`: optimizer steps done so far, which the learning rate follows. Metrics are those of the whole
        batch, on the ranks of the last pipeline stage (elsewhere only the optimizer's)."""
        batches = self._local(batches)
        self._zero_gradients()
        results = self.pipeline.train_values(batches, self.loss)
        metrics = self.optimizer_step(learning_rate(self.config.trainer.optimizer, step, self.config.schedule.updates))
        if not self.parallel.last_stage:
            return metrics
        sums = {name: ("sum", sum(part[name] for part in results)) for name in results[0]}
        return metrics | reduce(sums, self.parallel.token_group)


def _heads(modules: list[ValueModel]) -> set[str]:
    """Names of the value head's parameters on this rank, as `Weights` counts chunks."""
    return {
        f"{f'{chunk}.' if len(modules) > 1 else ''}value_head.{name}"
        for chunk, module in enumerate(modules)
        if module.post_process
        for name, _ in module.value_head.named_parameters()
    }
