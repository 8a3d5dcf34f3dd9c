"""Training of the critic on one rank, which it may share with the policy's trainer."""

from __future__ import annotations

from functools import partial

from slimx.config.schema import Config
from slimx.extras.token_level.value_loss import value_loss
from slimx.extras.token_level.value_trainer import ValueTrainer
from slimx.models.families import read_trunk
from slimx.trainer.parallel import ParallelState
from slimx.trainer.rank import TrainerRank


class CriticTrainer(ValueTrainer):
    """Trainer of PPO's critic, a value model."""

    def __init__(self, config: Config, parallel: ParallelState):
        """Builds the critic from the run's configuration. `parallel`: this rank's coordinates among the critic's
        ranks."""
        critic = config.critic
        assert critic is not None
        super().__init__(
            config.as_critic(),
            read_trunk(config.model),
            parallel,
            partial(value_loss, clip=critic.value_clip),
            head=critic.head,
            key="critic.optimizer",
            metrics="critic",
            holder="critic" if critic.placement == "own" else "trainer",
        )

    def offload(self, *, weights: bool = True) -> None:
        """Releases all of the critic's device memory, regardless of `weights`, because its weights are never
        published."""
        super().offload()


def make_critic(rank: TrainerRank) -> CriticTrainer:
    """Builds a rank's critic; this is the entry point for the role "critic"."""
    return CriticTrainer(rank.config, rank.parallel)
