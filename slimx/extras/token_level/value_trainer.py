"""Training of a value model on one rank; critic and reward model share this code. Every method is called on all ranks
of the model together."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.extras.token_level.value_loss import ValueInputs, ValueLoss
from slimx.extras.token_level.value_model import ValueModel
from slimx.layout.megatron import MegatronLayout
from slimx.models.families import SCORE, ModelSpec
from slimx.models.files.reader import CheckpointReader, check_finite
from slimx.trainer.device.backends import choose_backends, installed
from slimx.trainer.model.build import build_model, unwrap
from slimx.trainer.model.weights import Weights
from slimx.trainer.operation import operation
from slimx.trainer.parallel import ParallelState
from slimx.trainer.step.forward_backward import Pipeline
from slimx.trainer.step.metrics import combine, reduce, summed
from slimx.trainer.step.optimizer import OptimizerStep, build_optimizer, learning_rate
from slimx.trainer.trained_model import TrainedModel


class ValuePipeline(Pipeline):
    """Forward and backward passes of a value model over a list of micro-batches."""

    def values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Returns the values at every position, one tensor [T] per micro-batch; [] except on the last pipeline
        stage."""

        def collect(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            values = output[0].float()
            return values.sum(), torch.zeros((), dtype=torch.int), values

        with torch.no_grad():
            return self._schedule(batches, collect, forward_only=True)

    def train_values(self, batches: list[MicroBatch], loss: ValueLoss) -> list[dict[str, torch.Tensor]]:
        """Accumulates gradients, and returns the loss's metrics for each micro-batch; [] except on the last pipeline
        stage."""

        def compute(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            total, metrics = loss(ValueInputs(predicted=output[0].float(), **self._columns(batch)))
            return total, torch.zeros((), dtype=torch.int), metrics

        return self._schedule(batches, compute, forward_only=False)


class ValueTrainer(TrainedModel):
    """Value model, optimizer and pipeline of one rank."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        parallel: ParallelState,
        loss: ValueLoss,
        *,
        kind: type[ValueModel] = ValueModel,
        head: Literal["zero", "normal"],
        key: str,
        metrics: str,
        holder: str,
    ):
        """Builds model, optimizer and pipeline.

        `config`: configuration whose `trainer` section describes this model; `spec`: model without an output layer;
        `kind`: class of the model. `head`: initial values of the value head, used if the initial weights do not contain
        one. `key`: configuration key of the optimizer in messages; `metrics`: prefix of the optimizer's metrics;
        `holder`: name of the ranks in messages."""
        trainer = config.trainer
        backends = choose_backends(trainer, device=parallel.device.type, packages=installed(), experts=spec.experts)
        chunks, _ = build_model(spec, config, backends, device=parallel.device, kind=kind)
        modules = [unwrap(chunk) for chunk in chunks]
        self.heads = [module.value_head for module in modules if module.post_process]
        """Value head on the last pipeline stage, as a list of one module; [] on other stages."""
        layout = MegatronLayout(spec.table, parallel.sizes)
        weights = Weights(modules, spec, layout, parallel.rank, excluded=_heads(modules))
        weights.load(config.initial_weights)
        trained_head = read_score(Path(config.initial_weights)) if self.heads else None
        for value_head in self.heads:
            value_head.reset(head, config.run.seed)
            if trained_head is not None:
                value_head.load(trained_head)
        options = trainer.optimizer
        undecayed = weights.matching(options.no_weight_decay, f"{key}.no_weight_decay")
        super().__init__(config, parallel, chunks, weights, build_optimizer(config, chunks, undecayed), holder)
        named = weights.trainable()
        for value_head in self.heads:
            for name, parameter in value_head.named_parameters():
                named[f"value_head.{name}"] = parameter
        self.optimizer_step = OptimizerStep(
            self.optimizer, options, named, parallel.host_group, key=key, metrics=metrics
        )
        self.loss = loss
        self.pipeline = ValuePipeline(self.chunks, parallel.device)

    @operation("values", needs="weights")
    def values(self, batches: list[MicroBatch]) -> list[np.ndarray]:
        """Returns the values at every position, float32, one array [T] per micro-batch; [] except on the last pipeline
        stage."""
        parts = self.pipeline.values(self._local(batches))
        if not self.parallel.last_stage:
            return []
        pairs = zip(parts, batches, strict=True)
        return [self.context.gather(part, batch.lengths).cpu().numpy() for part, batch in pairs]

    @operation("train", needs="training")
    def train_updates(self, updates: list[list[MicroBatch]], *, step: int) -> dict[str, float]:
        """Runs all optimizer updates of step `step` (counted from 0), one for each list of micro-batches.

        Returns the combined metrics of the updates."""
        done = step * len(updates)
        metrics = [self.train_step(batches, step=done + index) for index, batches in enumerate(updates)]
        self._gather()
        return combine(metrics)

    def train_step(self, batches: list[MicroBatch], *, step: int) -> dict[str, float]:
        """Runs the forward and backward passes and one optimizer step on this data-parallel rank's micro-batches, which
        contain the inputs of the loss.

        `step`: number of earlier optimizer steps, which determines the learning rate. Ranks of the last pipeline stage
        return metrics for the complete batch; other ranks return only those of the optimizer."""
        batches = self._local(batches)
        self._zero_gradients()
        results = self.pipeline.train_values(batches, self.loss)
        metrics = self.optimizer_step(learning_rate(self.config.trainer.optimizer, step, self.config.schedule.updates))
        if not metrics[f"{self.optimizer_step.prefix}/skipped"]:
            self.weights.changed()
        if not self.parallel.last_stage:
            return metrics
        return metrics | reduce(summed(results), self.parallel.token_group)


def _heads(modules: list[ValueModel]) -> set[str]:
    """Returns the names of the value head's parameters on this rank, prefixed with the model chunk's number if the rank
    has several chunks."""
    names = set()
    for chunk, module in enumerate(modules):
        if module.post_process:
            prefix = f"{chunk}." if len(modules) > 1 else ""
            for name, _ in module.value_head.named_parameters():
                names.add(f"{prefix}value_head.{name}")
    return names


def read_score(directory: Path) -> torch.Tensor | None:
    """Reads the weight [1, hidden] of the value head in the checkpoint `directory`. Returns None if the checkpoint,
    like a policy's, has no value head."""
    reader = CheckpointReader(directory)
    if SCORE not in reader.names:
        return None
    head = reader.whole(SCORE)
    check_finite(head, SCORE, reader.path)
    return head
