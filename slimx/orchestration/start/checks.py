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
from slimx.data.prompts.mapping import make_mapping
from slimx.data.prompts.read import iter_prompts
from slimx.errors import SlimxError, not_installed
from slimx.layout.ranks import sizes_of
from slimx.models.families import configured_model
from slimx.models.files.formats import format_of
from slimx.models.files.index import check_downloaded
from slimx.observability.live.run_lock import check_usable
from slimx.orchestration.start.prompts import check_order, first_prompt, row_images, source_prompts
from slimx.orchestration.state.directory import EVALUATIONS, check_generation, finished, resume_point
from slimx.orchestration.state.resume import ComparedPolicy, check_resume
from slimx.orchestration.state.saves import CURSOR, RunState, Saves, read_state
from slimx.preflight.facts import weight_facts
from slimx.rollout.hook_loading import load_hooks
from slimx.runtime.user_files import private_directory
from slimx.trainer.checkpoint.files import Damaged


def without_trainers(config: Config, checkpoint: Path | None) -> Config:
    """Returns a copy of `config` for a command without trainers, whose engines load the Hugging Face directory
    `checkpoint`, or, if that is None, the weights from which training would start. Raises SlimxError for weights that
    engines cannot load."""
    if any(policy.shares is None for policy in config.policies.values()):
        raise SlimxError(
            "slimx generate and slimx eval do not support several trained policies; evaluate during training "
            "(eval.prompts), or remove the additional policies from the section policies",
        )
    if not config.rollout.policy_engines:
        remedy = "rollout.engines is empty; add an engine group to rollout.engines"
        if config.rollout.replay:
            remedy = "rollout.replay is set; remove rollout.replay"
        raise SlimxError(
            f"slimx has no engine that can generate: {remedy}",
            code="engines.none",
            about="rollout.replay" if config.rollout.replay else "rollout.engines",
        )
    weights = checkpoint
    if weights is None and config.trainer.load:
        weights = Path(config.trainer.load)
    if weights is not None:
        _check_loadable(weights, "checkpoint" if checkpoint else "trainer.load")
    groups = []
    for group in config.rollout.engines:
        if not group.frozen and group.urls:
            raise SlimxError(
                f"rollout.engines group {group.name} has the urls of running servers, but slimx does not know the "
                "weights of these servers; set count instead of urls, so that slimx starts the engines",
                code="engines.urls",
                about=group.name,
            )
        if weights is not None and not group.frozen and (checkpoint is not None or group.model is None):
            # because an export may contain no tokenizer
            sglang = {"tokenizer_path": config.model.path} | group.sglang
            group = group.model_copy(update={"model": str(weights), "sglang": sglang})
        groups.append(group)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"engines": tuple(groups)}),
            "schedule": config.schedule.model_copy(update={"colocate": False}),  # there are no trainers
        }
    )


def _check_loadable(weights: Path, key: str) -> None:
    """Raises SlimxError if engines cannot load the directory `weights`. `key`: configuration key that names the
    directory, for messages."""
    if format_of(weights) is not None:
        raise SlimxError(
            f"{key}: {weights} is not in Hugging Face's format, the only format that engines load; convert the "
            "weights with `slimx convert`, or set checkpoint.export_every to export weights during training",
            code="engines.weights",
            about=key,
        )
    if not (weights / "config.json").is_file():
        raise SlimxError(
            f"{key}: {weights} contains no config.json; choose a Hugging Face directory with weights",
            code="engines.weights",
            about=key,
        )


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
            _check_order(config, state, forked=point.parent != saves.directory)

    _check_state(point, check)


def generation_config(config: Config, checkpoint: Path | None) -> Config:
    """Returns the configuration for `slimx generate`, whose engines load `checkpoint`. Raises SlimxError if the command
    cannot start, or cannot resume where an earlier `slimx generate` stopped in the same directory."""
    config = without_trainers(config, checkpoint)
    directory = Path(config.run.dir)
    saves = Saves(directory / CURSOR, keep=1)
    check_generation(config, directory, saves)
    check_usable(directory)
    check_parts(config)

    def check(state: RunState) -> None:
        if state.step < config.schedule.steps:
            _check_order(config, state, forked=False)

    _check_state(saves.newest(), check)
    return config


def evaluation_config(config: Config, checkpoint: Path | None) -> Config:
    """Returns the configuration for `slimx eval`, whose engines load `checkpoint`. Raises SlimxError if the command
    cannot start."""
    options = config.eval.model_copy(update={"every": None})  # a run may have eval.prompts without eval.every
    config = without_trainers(config.model_copy(update={"eval": options}), checkpoint)
    if not config.eval.files:
        raise SlimxError(
            "eval.prompts is null, so there is nothing to evaluate; set eval.prompts to a file of prompts",
            code="eval.prompts",
            about="eval.prompts",
        )
    check_usable(Path(config.run.dir) / EVALUATIONS)
    check_parts(config)
    return config


def check_parts(config: Config) -> None:
    """Raises SlimxError for the first of the run's packages, addresses, settings, paths, prompts and hooks that cannot
    be used."""
    for name in PACKAGES:
        _check_package(name)
    check_reachable(config.cluster.ray_address)
    if config.cluster.ray_address is None:
        check_token()
        private_directory()
    device = "cuda" if config.cluster.device == "cuda" else "cpu"  # "auto" needs torch; the CPU accepts more
    facts = config.sections
    refuse(broken(all_rules(), facts | {"local_device": device}, before=facts))
    for policy in config.by_policy.values():
        configured_model(policy)
        for name, directory in weight_facts(policy).items():
            if directory is not None:
                _check_directory(LOADED[name], directory)
    if config.rollout.replay:
        return
    images = row_images(config, False)
    first_prompt(config, images)
    for name, path in config.eval.files.items():
        mapping = make_mapping(config.eval.fields, config.eval.map, config.rollout.system, images, section="eval")
        next(iter_prompts(path, mapping, dataset=name or None))
    load_hooks(config)
    load_credit(config.algorithm.credit)


def _check_state(point: Path | None, check: Callable[[RunState], None]) -> None:
    """Calls `check` with the run state saved in `point`, the checkpoint to resume from, if any. Ignores a damaged
    checkpoint, because the run handles it when it starts."""
    if point is not None:
        with suppress(Damaged):
            check(read_state(point))


def _check_order(config: Config, state: RunState, *, forked: bool) -> None:
    prompts = {} if config.rollout.replay else source_prompts(config.rollout, row_images(config, False))
    check_order(config, prompts, state.rollouts, forked=forked)


def _check_directory(key: str, directory: Path) -> None:
    check_downloaded(directory)
    if not directory.is_dir():
        base = "" if directory.is_absolute() else f" in the working directory {Path.cwd()}"
        raise SlimxError(
            f"{key}: there is no directory {directory}{base}; set {key} to an existing directory",
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
