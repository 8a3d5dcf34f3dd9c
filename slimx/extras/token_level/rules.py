"""Configuration rules for the critic: its algorithm, its ranks and its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimx.config.rule import Problems, refuse, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic, critic_keys, critic_trainer
from slimx.config.sections.general import Schedule
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError, counted
from slimx.rules.flow import UPDATE, update_rows
from slimx.rules.layout import split_problems
from slimx.rules.unproven import sections_in, table_problems

if TYPE_CHECKING:
    from pathlib import Path

    from slimx.layout.ranks import Sizes
    from slimx.models.families import ModelSpec

UNPROVEN = {"critic": ("critic.optimizer.kind", "critic.optimizer.moments_dtype")}
"""Settings that have not been verified together with a critic, in the format of `slimx.rules.unproven.UNPROVEN`."""


@rule("unproven", "critic", facts=sections_in(UNPROVEN))
def unproven(**sections: object) -> Problems:
    yield from table_problems(UNPROVEN, sections)


@rule("algorithm.critic", "critic")
def has_critic(algorithm: Algorithm, critic: Critic | None) -> Problems:
    if algorithm.advantages.kind == "gae" and critic is None:
        yield "algorithm.name", "algorithm.advantages=gae needs a critic; add a section `critic: {}`"
    if algorithm.advantages.kind != "gae" and critic is not None:
        yield f"algorithm.name={algorithm.name} uses no critic; remove the critic section, or set algorithm.name=ppo"


@rule("critic.layout", "critic.layout")
def critic_fits(trainer: Trainer, critic: Critic | None) -> Problems:
    if critic is not None:
        critic_trainer(trainer, critic)
    yield from ()


@rule("batch.critic_ranks", "critic.layout.data")
def feeds_critic(rollout: Rollout, schedule: Schedule, critic_sizes: Sizes | None) -> Problems:
    rows = update_rows(rollout, schedule)
    if critic_sizes is not None and rows < critic_sizes.data:
        yield (
            f"an update has only {counted(rows, 'rollout')} {UPDATE}, but each of the critic's "
            f"{critic_sizes.data} data-parallel ranks needs at least one; lower critic.layout.data to at most {rows}"
        )


@rule("critic.split", "critic.layout")
def critic_splits(
    critic: Critic | None, critic_view: Trainer | None, critic_spec: ModelSpec | None, critic_sizes: Sizes | None
) -> Problems:
    if critic is None or critic_view is None or critic_spec is None or critic_sizes is None:
        return
    try:
        with critic_keys(critic):
            refuse(split_problems(critic_view, critic_spec, critic_sizes))
    except SlimxError as error:
        yield error.about, str(error)


@rule("weights.critic_tensors", "critic.load")
def critic_has_tensors(critic_spec: ModelSpec | None, critic_weights: Path | None) -> Problems:
    from slimx.models.files.formats import format_of
    from slimx.models.files.reader import CheckpointReader  # imports torch, which planning does not need

    if critic_spec is None or critic_weights is None:
        return
    checkpoint_format = format_of(critic_weights)
    if checkpoint_format is not None:
        yield (
            f"{critic_weights} is a checkpoint of {checkpoint_format.name}, which cannot initialize a critic; "
            "convert the checkpoint with `slimx convert`, and set critic.load to the resulting Hugging Face directory"
        )
    else:
        CheckpointReader(critic_weights).check(critic_spec.table)
