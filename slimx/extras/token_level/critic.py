"""One rank's part of the critic, whose ranks may be those of the policy's trainer."""

from __future__ import annotations

from functools import partial

from slimx.config.schema import Config
from slimx.extras.token_level.value_loss import value_loss
from slimx.extras.token_level.value_trainer import ValueTrainer
from slimx.models.families import read_trunk
from slimx.trainer.parallel import ParallelState
from slimx.trainer.rank import TrainerRank


class CriticTrainer(ValueTrainer):
    """The value model of PPO."""

    def __init__(self, config: Config, parallel: ParallelState):
        """`config`: that of the run; `parallel`: the place of this rank among the critic's."""
        critic = config.critic
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
        """Give all of the critic's memory back: nothing is published from its weights."""
        super().offload()


def make_critic(rank: TrainerRank) -> CriticTrainer:
    """Build the critic of a rank (role "critic")."""
    return CriticTrainer(rank.config, rank.parallel)
