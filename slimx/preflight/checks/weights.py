"""Rules about the directories that initial weights are read from; a plan, which reads none, does without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimx.config.rule import rule
from slimx.config.sections.algorithm import Algorithm
from slimx.models.families import ModelSpec
from slimx.models.files.megatron_directory import check_fit, is_megatron


@rule("weights.tensors", about="trainer.load")
def has_tensors(spec: ModelSpec, weights: Path) -> Iterator[str]:
    from slimx.models.files.reader import CheckpointReader

    if is_megatron(weights):
        check_fit(weights, spec.table, prediction=spec.prediction_layers)
    else:
        reader = CheckpointReader(weights)
        reader.check(spec.table)
        reader.check_copies(spec.table)
    yield from ()


@rule("weights.reward_model", about="trainer.load")
def starts_from_hugging_face(algorithm: Algorithm, weights: Path) -> Iterator[str]:
    if algorithm.scores and is_megatron(weights):
        yield (
            f"a reward model cannot start from {weights}, which is Megatron-LM's; convert it with `slimx convert` and "
            "give the Hugging Face directory in trainer.load"
        )


@rule("weights.critic_tensors", about="critic.load")
def critic_has_tensors(critic_spec: ModelSpec | None, critic_weights: Path | None) -> Iterator[str]:
    if critic_spec is None or critic_weights is None:
        return
    from slimx.models.files.reader import CheckpointReader

    if is_megatron(critic_weights):
        yield (
            f"the critic cannot start from {critic_weights}, which is Megatron-LM's; give a Hugging Face directory in "
            "critic.load"
        )
    else:
        CheckpointReader(critic_weights).check(critic_spec.table)
