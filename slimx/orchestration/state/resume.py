"""A checkpoint can be continued or not: what it keeps of trainers, against what this run has."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.errors import SlimxError
from slimx.layout.ranks import Sizes
from slimx.orchestration.state.saves import RunState
from slimx.trainer.checkpoint import files


class SavedPolicy(Protocol):
    """A trained policy as a checkpoint is compared with it."""

    config: Config
    sizes: Sizes


def trainer_state(config: Config, sizes: Sizes) -> dict[str, Any]:
    """Fields of a checkpoint about one policy's trainers."""
    trainer = config.trainer
    return {
        "layout": layout_of(sizes),
        "distributed_optimizer": trainer.distributed_optimizer,
        "freeze": list(trainer.freeze),
        "optimizer": trainer.optimizer.kind,
        "lora": _adapters(config),
    }


def _adapters(config: Config) -> dict[str, Any] | None:
    """`trainer.lora` as a checkpoint keeps it: what the adapters began with is not part of it."""
    return None if config.trainer.lora is None else config.trainer.lora.model_dump(mode="json", exclude={"load"})


def layout_of(sizes: Sizes) -> dict[str, Any]:
    """Parallel sizes as a checkpoint keeps them."""
    return json.loads(json.dumps(asdict(sizes)))  # tuples become the lists that run.json gives back


def check_resume(path: Path, state: RunState, policies: Mapping[str, SavedPolicy], critic: Sizes | None = None) -> None:
    """Check that a run of `policies` can continue checkpoint `path`, before anything is started.

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
        raise SlimxError(
            f"{path} holds {'no' if state.critic is None else 'a'} critic, but this run has "
            f"{'none' if critic is None else 'one'} (algorithm.name={config.algorithm.name}); choose another run.dir, "
            "with trainer.load to start from weights",
            code="resume.no_critic" if state.critic is None else "resume.critic",
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


def _check_policy(path: Path, keys: str, there: Mapping[str, Any], config: Config, sizes: Sizes) -> None:
    """Check that what `there` says of the policy whose section trainer is at `keys` can be continued. Raises
    SlimxError."""
    if there["lora"] != _adapters(config):
        raise SlimxError(
            f"{path} was written with {keys}.lora={there['lora']}, this run has {_adapters(config)}: adapters are part "
            "of the weights that it holds; keep them, or begin a new run from its export (checkpoint.export_hf) with "
            "trainer.load",
            code="resume.lora",
            about=str(path),
        )
    if not config.checkpoint.load_optimizer:
        return
    if there["freeze"] != list(config.trainer.freeze):
        raise SlimxError(
            f"{path} was written with {keys}.freeze={there['freeze']}, this run has {list(config.trainer.freeze)}: "
            "what was frozen has no optimizer state; keep the patterns, or set checkpoint.load_optimizer=false to go "
            "on with new moments",
        )
    kind = config.trainer.optimizer.kind
    if there["optimizer"] != kind:
        raise SlimxError(
            f"{path} holds the state of {keys}.optimizer.kind={there['optimizer']}, this run has {kind}; keep the "
            "kind, or set checkpoint.load_optimizer=false to go on with new moments",
            code="resume.optimizer",
            about=f"{keys}.optimizer.kind",
        )
    _check_move(path, keys, there["layout"], sizes, there["distributed_optimizer"], config)


def _check_move(path: Path, keys: str, there: dict[str, Any], sizes: Sizes, distributed: bool, config: Config) -> None:
    """Check that the optimizer state of the model that `keys` configure can be moved. Raises SlimxError."""
    here = layout_of(sizes)
    about = refused = ""
    if (there["expert"] > 1) != (here["expert"] > 1):
        about, refused = f"{keys}.expert", f"between {keys}.expert=1 and larger sizes (only among the larger ones)"
    elif distributed != config.trainer.distributed_optimizer:
        about = "trainer.distributed_optimizer"
        refused = f"between {about}=true and false"
    if refused:
        raise SlimxError(
            f"{path} was written with {_words(there, distributed)}, this run has "
            f"{_words(here, config.trainer.distributed_optimizer)}: megatron-core does not move optimizer state "
            f"{refused}; keep that, or set checkpoint.load_optimizer=false to go on with new moments",
            code="resume.layout",
            about=about,
        )


def _words(layout: dict[str, Any], distributed: bool) -> str:
    return (
        "TP{tensor} PP{pipeline} VPP{virtual} CP{context} DP{data} EP{expert} ETP{expert_tensor}".format(**layout)
        + f" and {'a' if distributed else 'no'} distributed optimizer"
    )
