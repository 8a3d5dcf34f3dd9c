"""Rules about rollouts that the model, a micro-batch or the data-parallel ranks must take."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import rule
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec

UPDATE = "(rollout.prompts_per_step x rollout.group_size / schedule.updates_per_step)"


@rule("batch.positions", about="rollout.max_prompt_tokens")
def has_positions(rollout: Rollout, spec: ModelSpec) -> Iterator[str]:
    positions = spec.gpt["max_sequence_length"]
    if rollout.longest > positions:
        yield (
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.sampling.max_new_tokens "
            f"{rollout.sampling.max_new_tokens} exceed the model's {positions} positions; lower one"
        )


@rule("batch.microbatch", about="trainer.max_tokens_per_microbatch")
def fits_microbatch(rollout: Rollout, trainer: Trainer, sizes: Sizes) -> Iterator[str]:
    # A trajectory of n tokens has n - 1 positions, padded where context parallelism cuts it; demonstrations any number.
    positions = sizes.packed_length(rollout.longest - 1)
    if rollout.policy_engines and positions > trainer.max_tokens_per_microbatch:
        yield (
            f"a rollout may have {rollout.longest} tokens (rollout.max_prompt_tokens + "
            "rollout.sampling.max_new_tokens), which "
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} does not hold; set it to "
            f"{positions} at least, or lower one of the others"
        )


@rule("batch.critic_ranks", about="critic.layout.data")
def feeds_critic(rollout: Rollout, schedule: Schedule, critic_sizes: Sizes | None) -> Iterator[str]:
    rows = _rows(rollout, schedule)
    if critic_sizes is not None and rows < critic_sizes.data:
        yield (
            f"an update of {rows} rollouts {UPDATE} cannot feed the critic's {critic_sizes.data} data-parallel ranks; "
            "lower critic.layout.data"
        )


@rule("batch.ranks", about="trainer.data")
def feeds_trainers(rollout: Rollout, schedule: Schedule, sizes: Sizes) -> Iterator[str]:
    rows = _rows(rollout, schedule)
    if rows < sizes.data:
        yield (
            f"an update of {rows} rollouts {UPDATE} cannot feed {sizes.data} data-parallel ranks; raise one of the "
            "first two, or lower the third or trainer.data"
        )


def _rows(rollout: Rollout, schedule: Schedule) -> int:
    return rollout.prompts_per_step * rollout.group_size // schedule.updates_per_step
