"""Decides whether a run can resume from a checkpoint, by comparing the trainers that wrote the checkpoint with the
trainers of the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.ranks import Sizes
from slimx.orchestration.state.saves import RunState
from slimx.trainer.checkpoint import files


class SavedPolicy(Protocol):
    """Parts of a trained policy that `check_resume` needs: its configuration and its parallel sizes."""

    @property
    def config(self) -> Config: ...

    @property
    def sizes(self) -> Sizes: ...


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """Implementation of `SavedPolicy` for checks that run before a run's models are read."""

    config: Config
    sizes: Sizes


def trainer_state(config: Config, sizes: Sizes) -> Json:
    """Returns the fields that describe one policy's trainers in the run.json of a checkpoint."""
    trainer = config.trainer
    return {
        "layout": layout_of(sizes),
        "distributed_optimizer": trainer.distributed_optimizer,
        "freeze": list(trainer.freeze),
        "optimizer": trainer.optimizer.kind,
        "lora": _adapters(config),
    }


def _adapters(config: Config) -> Json | None:
    """Returns section `trainer.lora` as a checkpoint stores it: without `load`, the path of the initial adapters."""
    return None if config.trainer.lora is None else config.trainer.lora.model_dump(mode="json", exclude={"load"})


def layout_of(sizes: Sizes) -> Json:
    """Returns the parallel sizes `sizes` in the form in which a checkpoint stores them."""
    return json.loads(json.dumps(asdict(sizes)))  # with lists instead of tuples, like the contents of run.json


def check_resume(path: Path, state: RunState, policies: Mapping[str, SavedPolicy], critic: Sizes | None = None) -> None:
    """Checks, before anything is started, that a run that trains `policies` can resume from checkpoint `path`, whose
    run state is `state`. `critic`: parallel sizes of the run's critic, if any. Raises SlimxError naming what differs,
    or the file that is missing or has the wrong size."""
    config = policies[ACTOR].config
    files.check_sizes(path, files.read_manifest(path))
    if "replay" in state.rollouts and not config.rollout.replay:
        raise SlimxError(
            f"{path} was written by a run that replayed {state.rollouts['replay']}, so this checkpoint contains no "
            "position in the prompts; set rollout.replay again, or set trainer.load to this checkpoint in a new run",
            code="resume.replay",
            about=str(path),
        )
    if (state.critic is None) != (critic is None):
        holds, has, code = "a critic", "no critic", "resume.critic"
        if state.critic is None:
            holds, has, code = "no critic", "a critic", "resume.no_critic"
        raise SlimxError(
            f"{path} contains {holds}, but this run has {has} (algorithm.name={config.algorithm.name}); choose "
            "another run.dir, and set trainer.load to this checkpoint to start from its weights",
            code=code,
            about=str(path),
        )
    if set(state.policies) != set(policies):
        raise SlimxError(
            f"{path} contains the policies {_listed(state.policies)}, but this run trains {_listed(policies)}; use "
            "the checkpoint's names in the section policies, or choose another run.dir and set trainer.load to this "
            "checkpoint to start from its weights",
            code="resume.policies",
            about="policies",
        )
    for name, policy in policies.items():
        section = "trainer" if name == ACTOR else f"policies.{name}.trainer"
        _check_policy(path, section, state.policies[name], policy.config, policy.sizes)
    if state.critic is not None and critic is not None and config.checkpoint.load_optimizer:
        distributed = state.policies[ACTOR]["distributed_optimizer"]
        _check_move(path, "critic.layout", state.critic, critic, distributed, config)


def _listed(policies: Collection[str]) -> str:
    return " and ".join(sorted(policies))


def _check_policy(path: Path, keys: str, saved: Json, config: Config, sizes: Sizes) -> None:
    """Raises SlimxError if the trainers of one policy cannot resume from checkpoint `path`. `saved`: fields that
    describe the policy's trainers in the checkpoint. `keys`: configuration key of the policy's `trainer` section, for
    error messages."""
    if saved["lora"] != _adapters(config):
        raise SlimxError(
            f"{path} was written with {keys}.lora={saved['lora']}, but this run has {_adapters(config)}, and "
            f"adapters are part of the saved weights; set {keys}.lora to the checkpoint's value, or start a new run "
            "with trainer.load set to an export (checkpoint.export_hf)",
            code="resume.lora",
            about=str(path),
        )
    if not config.checkpoint.load_optimizer:
        return
    if saved["freeze"] != list(config.trainer.freeze):
        raise SlimxError(
            f"{path} was written with {keys}.freeze={saved['freeze']}, but this run has "
            f"{list(config.trainer.freeze)}, and frozen weights have no optimizer state; set {keys}.freeze to the "
            "checkpoint's value, or set checkpoint.load_optimizer=false to start with new optimizer state"
        )
    kind = config.trainer.optimizer.kind
    if saved["optimizer"] != kind:
        raise SlimxError(
            f"{path} contains optimizer state for {keys}.optimizer.kind={saved['optimizer']}, but this run has {kind}; "
            f"set {keys}.optimizer.kind to the checkpoint's value, or set checkpoint.load_optimizer=false to start "
            "with new optimizer state",
            code="resume.optimizer",
            about=f"{keys}.optimizer.kind",
        )
    _check_move(path, keys, saved["layout"], sizes, saved["distributed_optimizer"], config)


def _check_move(path: Path, keys: str, saved: Json, sizes: Sizes, distributed: bool, config: Config) -> None:
    """Raises SlimxError if the saved optimizer state of a model cannot be resharded from the parallel sizes `saved` to
    `sizes`. `distributed`: True if a distributed optimizer wrote the state. `keys`: configuration key of the model's
    parallel sizes, for messages."""
    current = layout_of(sizes)
    about = ""
    refused = ""
    if (saved["expert"] > 1) != (current["expert"] > 1):
        about = f"{keys}.expert"
        refused = f"between {keys}.expert=1 and larger sizes, only among larger sizes"
    elif distributed != config.trainer.distributed_optimizer:
        about = "trainer.distributed_optimizer"
        refused = f"between {about}=true and false"
    if refused:
        raise SlimxError(
            f"{path} was written with {_words(saved, distributed)}, but this run has "
            f"{_words(current, config.trainer.distributed_optimizer)}, and megatron-core cannot move optimizer "
            f"state {refused}; set {about} to the checkpoint's value, or set checkpoint.load_optimizer=false to start "
            "with new optimizer state",
            code="resume.layout",
            about=about,
        )


def _words(layout: Json, distributed: bool) -> str:
    return (
        "TP{tensor} PP{pipeline} VPP{virtual} CP{context} DP{data} EP{expert} ETP{expert_tensor}".format(**layout)
        + f" and {'a' if distributed else 'no'} distributed optimizer"
    )
