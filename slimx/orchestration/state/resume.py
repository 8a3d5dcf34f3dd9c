"""Decides if a checkpoint can be resumed: compares its trainers with those of this run."""

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
    """A trained policy that is compared with a checkpoint."""

    @property
    def config(self) -> Config: ...

    @property
    def sizes(self) -> Sizes: ...


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """A `SavedPolicy` without anything else."""

    config: Config
    sizes: Sizes


def trainer_state(config: Config, sizes: Sizes) -> Json:
    """Returns the checkpoint fields that describe one policy's trainers."""
    trainer = config.trainer
    return {
        "layout": layout_of(sizes),
        "distributed_optimizer": trainer.distributed_optimizer,
        "freeze": list(trainer.freeze),
        "optimizer": trainer.optimizer.kind,
        "lora": _adapters(config),
    }


def _adapters(config: Config) -> Json | None:
    """Returns `trainer.lora` as stored in a checkpoint, without the initial adapters."""
    return None if config.trainer.lora is None else config.trainer.lora.model_dump(mode="json", exclude={"load"})


def layout_of(sizes: Sizes) -> Json:
    """Returns parallel sizes as stored in a checkpoint."""
    return json.loads(json.dumps(asdict(sizes)))  # lists instead of tuples, as run.json is read


def check_resume(path: Path, state: RunState, policies: Mapping[str, SavedPolicy], critic: Sizes | None = None) -> None:
    """Checks that a run of `policies` can resume checkpoint `path`, before anything is started.

    `critic`: sizes of this run's critic. Raises SlimxError naming both layouts, or a file that is missing or has
    another size."""
    config = policies[ACTOR].config
    files.check_sizes(path, files.read_manifest(path))
    if "replay" in state.rollouts and not config.rollout.replay:
        raise SlimxError(
            f"{path} was written by a replay of {state.rollouts['replay']}, which has no position in the prompts; set "
            "rollout.replay, or begin a new run from its weights (trainer.load)",
            code="resume.replay",
            about=str(path),
        )
    if (state.critic is None) != (critic is None):
        holds, has, code = "a critic", "none", "resume.critic"
        if state.critic is None:
            holds, has, code = "no critic", "one", "resume.no_critic"
        raise SlimxError(
            f"{path} holds {holds}, but this run has {has} (algorithm.name={config.algorithm.name}); choose another "
            "run.dir, with trainer.load to start from weights",
            code=code,
            about=str(path),
        )
    if set(state.policies) != set(policies):
        raise SlimxError(
            f"{path} holds {_listed(state.policies)}, and this run trains {_listed(policies)}; keep the names in "
            "policies, or choose another run.dir, with trainer.load to start from weights",
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
    """Checks that the saved fields of the policy whose section trainer is at `keys` fit this run. Raises SlimxError."""
    if saved["lora"] != _adapters(config):
        raise SlimxError(
            f"{path} was written with {keys}.lora={saved['lora']}, this run has {_adapters(config)}: adapters are part "
            "of the saved weights; keep them, or begin a new run from its export (checkpoint.export_hf) with "
            "trainer.load",
            code="resume.lora",
            about=str(path),
        )
    if not config.checkpoint.load_optimizer:
        return
    if saved["freeze"] != list(config.trainer.freeze):
        raise SlimxError(
            f"{path} was written with {keys}.freeze={saved['freeze']}, this run has {list(config.trainer.freeze)}: "
            "frozen weights have no optimizer state; keep the patterns, or set checkpoint.load_optimizer=false to go "
            "on with new moments",
        )
    kind = config.trainer.optimizer.kind
    if saved["optimizer"] != kind:
        raise SlimxError(
            f"{path} holds the state of {keys}.optimizer.kind={saved['optimizer']}, this run has {kind}; keep the "
            "kind, or set checkpoint.load_optimizer=false to go on with new moments",
            code="resume.optimizer",
            about=f"{keys}.optimizer.kind",
        )
    _check_move(path, keys, saved["layout"], sizes, saved["distributed_optimizer"], config)


def _check_move(path: Path, keys: str, saved: Json, sizes: Sizes, distributed: bool, config: Config) -> None:
    """Checks that the optimizer state of the model configured at `keys` can be resharded. Raises SlimxError."""
    current = layout_of(sizes)
    about = ""
    refused = ""
    if (saved["expert"] > 1) != (current["expert"] > 1):
        about = f"{keys}.expert"
        refused = f"between {keys}.expert=1 and larger sizes (only among the larger ones)"
    elif distributed != config.trainer.distributed_optimizer:
        about = "trainer.distributed_optimizer"
        refused = f"between {about}=true and false"
    if refused:
        raise SlimxError(
            f"{path} was written with {_words(saved, distributed)}, this run has "
            f"{_words(current, config.trainer.distributed_optimizer)}: megatron-core does not move optimizer state "
            f"{refused}; keep that, or set checkpoint.load_optimizer=false to go on with new moments",
            code="resume.layout",
            about=about,
        )


def _words(layout: Json, distributed: bool) -> str:
    return (
        "TP{tensor} PP{pipeline} VPP{virtual} CP{context} DP{data} EP{expert} ETP{expert_tensor}".format(**layout)
        + f" and {'a' if distributed else 'no'} distributed optimizer"
    )
