"""One rank's part of the critic: its value model, and what it can be asked to do. Every method is called on all of the
critic's ranks together, which may be those of the policy's trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from slimx.algorithms.losses.value_loss import ValueInputs, ValueLoss, value_loss
from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.layout.megatron import MegatronLayout
from slimx.models.trunk import read_trunk
from slimx.trainer.checkpoint.load import restore
from slimx.trainer.checkpoint.save import Saver
from slimx.trainer.checkpoint.state import full_state
from slimx.trainer.context import ContextShard
from slimx.trainer.device.backends import choose_backends, installed
from slimx.trainer.device.offload import Offload
from slimx.trainer.model.build import build_model, unwrap
from slimx.trainer.model.value_model import ValueModel
from slimx.trainer.model.weights import Weights
from slimx.trainer.parallel import ParallelState
from slimx.trainer.step.forward_backward import Pipeline, sum_gradients
from slimx.trainer.step.metrics import combine, reduce
from slimx.trainer.step.optimizer import build_optimizer, learning_rate
from slimx.trainer.step.optimizer_step import OptimizerStep


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


class CriticTrainer:
    """Value model, optimizer and pipeline of one rank."""

    def __init__(self, config: Config, parallel: ParallelState):
        """`config`: that of the run; `parallel`: the place of this rank among the critic's."""
        self.config, self.parallel = config.as_critic(), parallel
        trainer, critic = self.config.trainer, self.config.critic
        spec = read_trunk(config.model)
        backends = choose_backends(trainer, device=parallel.device.type, packages=installed())
        self.chunks = build_model(spec, self.config, backends, device=parallel.device, kind=ValueModel)
        modules = [unwrap(chunk) for chunk in self.chunks]
        heads = [module.value_head for module in modules if module.post_process]
        for head in heads:
            head.reset(critic.head, config.run.seed)
        layout = MegatronLayout(spec.table, parallel.sizes)
        self.weights = Weights(modules, spec, layout, parallel.rank, beside=_heads(modules))
        self.weights.load(self.config.initial_weights)
        options = trainer.optimizer
        undecayed = self.weights.matching(options.no_weight_decay, "critic.optimizer.no_weight_decay")
        self.optimizer = build_optimizer(self.config, self.chunks, undecayed)
        named = self.weights.trainable() | {f"value_head.{n}": p for head in heads for n, p in head.named_parameters()}
        self.optimizer_step = OptimizerStep(
            self.optimizer, options, named, parallel.host_group, key="critic.optimizer", metrics="critic"
        )
        self.offloading = Offload(self.chunks, self.optimizer, parallel.device)
        self.loss = value_loss(clip=critic.value_clip)
        self.context = ContextShard(parallel.sizes.context, parallel.place.context, parallel.context_group)
        self.pipeline = ValuePipeline(self.chunks, parallel.device)
        self.saver = Saver(
            rank=parallel.rank,
            world=parallel.sizes.world,
            group=parallel.host_group,
            deadline_s=config.checkpoint.deadline,
            holder="critic" if critic.placement == "own" else "trainer",
        )
        settings = self.chunks[0].config
        settings.finalize_model_grads_func = sum_gradients
        settings.grad_scale_func = self.optimizer.scale_loss

    def values(self, batches: list[MicroBatch]) -> list[np.ndarray]:
        """Value at every position, float32, one array [T] per micro-batch (last stage only)."""
        parts = self.pipeline.values([self.context.take(batch) for batch in batches])
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
        batches = [self.context.take(batch) for batch in batches]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self.pipeline.train_values(batches, self.loss)
        metrics = self.optimizer_step(learning_rate(self.config.trainer.optimizer, step, self.config.schedule.updates))
        if not self.parallel.last_stage:
            return metrics
        sums = {name: ("sum", sum(part[name] for part in results)) for name in results[0]}
        return metrics | reduce(sums, self.parallel.token_group)

    def save(self, path: str, *, step: int) -> None:
        """Copy the state after optimizer step `step` and start writing this rank's part of it into `path`."""
        data_size = self.parallel.sizes.data
        state = full_state(self.chunks, self.optimizer, step=step, data_size=data_size, frozen=False)
        self.saver.begin(Path(path), state)

    def restore(self, path: str, *, same_layout: bool, load_optimizer: bool = True) -> None:
        """Continue from the checkpoint in `path`."""
        restore(Path(path), self.chunks, self.optimizer, same_layout=same_layout, load_optimizer=load_optimizer)


def _heads(modules: list[ValueModel]) -> set[str]:
    """Names of the value head's parameters on this rank, as `Weights` counts chunks."""
    return {
        f"{f'{chunk}.' if len(modules) > 1 else ''}value_head.{name}"
        for chunk, module in enumerate(modules)
        if module.post_process
        for name, _ in module.value_head.named_parameters()
    }
