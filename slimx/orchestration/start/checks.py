"""Checks that need neither torch nor a model, so that a wrong path is reported before slow imports. The checks change
nothing. When a run starts, it repeats these checks together with all others."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slimx.algorithms.credit import load_credit
from slimx.cluster.access import check_reachable, check_token
from slimx.config.rule import all_rules, broken, refuse
from slimx.config.schema import Config
from slimx.errors import SlimxError, not_installed
from slimx.layout.ranks import sizes_of
from slimx.models.families import configured_model
from slimx.models.files.index import check_downloaded
from slimx.observability.live.run_lock import check_usable
from slimx.orchestration.start.prompts import check_order, first_prompt, heldout_rows, row_images, source_prompts
from slimx.orchestration.state.directory import finished, resume_point
from slimx.orchestration.state.resume import ComparedPolicy, check_resume
from slimx.orchestration.state.saves import RunState, Saves, read_state
from slimx.preflight.facts import weight_facts
from slimx.rollout.hook_loading import load_generate, load_keep, load_rewards
from slimx.runtime.user_files import private_directory
from slimx.trainer.checkpoint.files import Damaged

PACKAGES = ("torch", "ray", "sglang", "transformers", "pydantic", "numpy")
"""Packages that must not be shadowed by a single file of the same name on the import path."""

LOADED = {
    "weights": "trainer.load",
    "adapters": "trainer.lora.load",
    "critic_weights": "critic.load",
    "teacher_weights": "algorithm.teacher",
}
"""Configuration keys that set the directories from which weights are loaded, by the directories' names in the result of
`weight_facts`."""


def check_training(config: Config) -> None:
    """Raises SlimxError if a training run of `config` cannot start, or cannot resume from its checkpoint."""
    directory = Path(config.run.dir)
    saves = Saves(directory / "checkpoints", keep=config.checkpoint.keep)
    point = resume_point(config, directory, saves)
    check_usable(directory)
    check_parts(config)

    def check(state: RunState) -> None:
        if finished(config, directory, state):
            return
        policies = {}
        for name, view in config.by_policy.items():
            policies[name] = ComparedPolicy(view, sizes_of(view.trainer))
        critic = None if config.critic is None else sizes_of(config.as_critic().trainer)
        if point is not None:
            check_resume(point, state, policies, critic)
            check_prompt_order(config, state, forked=point.parent != saves.directory)

    check_state(point, check)


def check_parts(config: Config) -> None:
    """Raises SlimxError for the first of the run's packages and addresses that cannot be used, or else for all of its
    settings, models, prompts and hooks that cannot."""
    for name in PACKAGES:
        _check_package(name)
    check_reachable(config.cluster.ray_address)
    if config.cluster.ray_address is None:
        check_token()
        private_directory()
    device = "cuda" if config.cluster.device == "cuda" else "cpu"  # "auto" needs torch; the CPU accepts more
    facts = config.facts
    problems = broken(all_rules(), facts | {"local_device": device}, before=facts)
    checks: list[Callable[[Config], object]] = [_check_weights]
    if not config.rollout.replay:
        checks += [_check_inputs, load_generate, load_rewards, load_keep]
    for check in checks:
        try:
            check(config)
        except SlimxError as error:
            problems.append(error)
    refuse(problems)


def _check_weights(config: Config) -> None:
    for policy in config.by_policy.values():
        configured_model(policy)
        for name, directory in weight_facts(policy).items():
            if directory is not None:
                _check_directory(LOADED[name], directory)


def _check_inputs(config: Config) -> None:
    """Raises SlimxError for a prompt file that cannot be read or has no valid first prompt, or for the credit hook."""
    images = row_images(config, False)
    first_prompt(config, images)
    for name in config.eval.sets:
        next(heldout_rows(config, name, images))
    load_credit(config.algorithm.credit)


def check_state(point: Path | None, check: Callable[[RunState], None]) -> None:
    """Calls `check` with the run state saved in `point`, the checkpoint to resume from, if any. Ignores a damaged
    checkpoint, because the run handles it when it starts."""
    if point is not None:
        with suppress(Damaged):
            check(read_state(point))


def check_prompt_order(config: Config, state: RunState, *, forked: bool) -> None:
    """Raises SlimxError if the order of the prompts of `config` differs from that of `state`, the state from which a
    run resumes. `forked`: True for the state of another run."""
    if not config.rollout.replay:
        check_order(config, source_prompts(config.rollout, row_images(config, False)), state.rollouts, forked=forked)


def _check_directory(key: str, directory: Path) -> None:
    check_downloaded(directory)
    if not directory.is_dir():
        raise SlimxError(
            f"{key}: there is no directory {directory.absolute()}; set {key} to an existing directory",
            code="weights.directory",
            about=key,
        )


def _check_package(name: str) -> None:
    """Raises SlimxError if the package `name` is missing or shadowed by a single-file module."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise not_installed(name)
    if spec.origin is None or Path(spec.origin).name == "__init__.py":
        return
    raise SlimxError(
        f"{spec.origin} is imported instead of the package {name}; rename the file, or remove its folder from "
        "PYTHONPATH",
        code="environment.shadowed",
        about=name,
    )
