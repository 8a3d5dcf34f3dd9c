"""One rank's part of a reward model that is trained in the place of a policy."""

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
    """A reward model: only differences of scores are learned from, so that a bias would have noise for a gradient."""

    BIAS = False


def score_loss(inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The function with the gradient of the Bradley-Terry loss, whose derivatives by the scores are known
    (`slimx.extras.preferences.bradley_terry`); its value means nothing, so there are no metrics."""
    scores = torch.where(inputs.weight > 0, inputs.predicted, 0.0)
    return -(inputs.weight * inputs.advantages * scores).sum(), {}


class RewardModelTrainer(ValueTrainer):
    """A trunk with a score for each token, of which the last token's counts. The score begins at 0, or with the head
    that an exported reward model has."""

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
        """As the policy's trainer is called; no engine has a version of these weights."""
        return super().train_updates(updates, step=step)

    @operation(needs="weights")
    def head(self) -> np.ndarray | None:
        """The head's weight, float32 [1, hidden]; None except on the last pipeline stage."""
        return self.heads[0].weight.detach().float().cpu().numpy() if self.heads else None
