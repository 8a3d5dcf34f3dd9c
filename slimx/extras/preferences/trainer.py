"""Trainer of a reward model on one rank, which replaces the trainer of a policy."""

from __future__ import annotations

import numpy as np
import torch

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch
from slimx.extras.token_level.value_loss import ValueInputs
from slimx.extras.token_level.value_model import ValueModel
from slimx.extras.token_level.value_trainer import ValueTrainer
from slimx.models.families import ModelSpec
from slimx.trainer.operation import operation
from slimx.trainer.parallel import ParallelState


class ScoreModel(ValueModel):
    """Model with a score per token. Its head has no bias: the loss depends only on differences of scores, so the
    gradient of a bias would be only noise."""

    BIAS = False


def score_loss(inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a scalar whose gradient is that of the Bradley-Terry loss, computed from the derivatives in
    `inputs.advantages` (`slimx.extras.preferences.bradley_terry`), and no metrics, because the scalar's value has no
    meaning."""
    scores = torch.where(inputs.weight > 0, inputs.predicted, 0.0)
    return -(inputs.weight * inputs.advantages * scores).sum(), {}


class RewardModelTrainer(ValueTrainer):
    """Trainer of a reward model, which scores every token; only the last token's score is used. The weight of the head
    is initialized to 0, or loaded from an exported reward model."""

    def __init__(self, config: Config, spec: ModelSpec, parallel: ParallelState):
        super().__init__(
            config,
            spec,
            parallel,
            score_loss,
            kind=ScoreModel,
            head="zero",
            key="trainer.optimizer",
            metrics="optim",
            holder="trainer",
        )

    @operation("train", needs="training")
    def train_updates(self, updates: list[list[MicroBatch]], *, step: int, version: int = 0) -> dict[str, float]:
        """Runs the updates of a training step as a policy's trainer does. `version` is ignored, because a reward
        model's weights are never published to engines."""
        return super().train_updates(updates, step=step)

    @operation(needs="weights")
    def head(self) -> np.ndarray | None:
        """Returns the weight of the head, float32 [1, hidden]; None except on the last pipeline stage."""
        return self.heads[0].weight.detach().float().cpu().numpy() if self.heads else None
