"""Trainer of one rank's part of a reward model, in place of a policy's trainer."""

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
    """Reward model. It learns only from differences of scores, so a bias would get noise as its gradient."""

    BIAS = False


def score_loss(inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a function with the gradient of the Bradley-Terry loss, whose derivatives by the scores are known
    (`slimx.extras.preferences.bradley_terry`). Its value is meaningless, so there are no metrics."""
    scores = torch.where(inputs.weight > 0, inputs.predicted, 0.0)
    return -(inputs.weight * inputs.advantages * scores).sum(), {}


class RewardModelTrainer(ValueTrainer):
    """A trunk with a score per token; only the last token's counts. The head starts at 0, or as the head of an exported
    reward model."""

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
        """Trains like the policy's trainer. `version` is ignored: engines never hold these weights."""
        return super().train_updates(updates, step=step)

    @operation(needs="weights")
    def head(self) -> np.ndarray | None:
        """Returns the head's weight, float32 [1, hidden]; None except on the last pipeline stage."""
        return self.heads[0].weight.detach().float().cpu().numpy() if self.heads else None
