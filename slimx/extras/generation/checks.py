"""Checks of commands without trainers, which need neither torch nor a model."""

from __future__ import annotations

import shlex
from pathlib import Path

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.models.files.formats import format_of
from slimx.observability.live.run_lock import check_usable
from slimx.orchestration.start.checks import check_parts, check_prompt_order, check_state
from slimx.orchestration.state.saves import CURSOR, RunState, Saves


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
            check_prompt_order(config, state, forked=False)

    check_state(saves.newest(), check)
    return config


def check_generation(config: Config, directory: Path, saves: Saves) -> None:
    """Raises SlimxError if `slimx generate` cannot start in `directory`, or cannot resume from the newest position in
    the prompts that is stored in `saves`."""
    if config.run.fork:
        raise SlimxError(
            "run.fork is set to continue the training of a run, but slimx generate does not train; remove run.fork",
            code="run.fork",
            about="run.fork",
        )
    if (directory / "checkpoints").exists():
        raise SlimxError(
            f"{directory} contains a training run; choose another run.dir for slimx generate",
            code="run.dir",
            about=str(directory),
        )
    if config.run.resume == "never" and (directory / "metrics.jsonl").exists():
        raise SlimxError(
            f"run.resume is never, but {directory} already contains rollouts; choose another run.dir",
            code="run.resume",
            about="run.resume",
        )
    if config.run.resume == "must" and saves.newest() is None:
        raise SlimxError(
            f"run.resume is must, but {saves.directory} contains no position in the prompts from which to "
            "resume; set run.resume to auto to start from the first prompt",
            code="run.resume",
            about="run.resume",
        )


def without_trainers(config: Config, checkpoint: Path | None, option: str = "--checkpoint") -> Config:
    """Returns a copy of `config` for a command without trainers, whose engines load the Hugging Face directory
    `checkpoint`, or, if that is None, the weights from which training would start. `option`: name of `checkpoint` for
    errors. Raises SlimxError for weights that engines cannot load."""
    if any(policy.shares is None for policy in config.policies.values()):
        raise SlimxError(
            "slimx generate and slimx eval do not support several trained policies; evaluate during training "
            "(eval.prompts), or remove the additional policies from the section policies",
        )
    if not config.served.policy:
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
        _check_loadable(weights, option if checkpoint else "trainer.load", config.model.path)
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
            "eval": config.eval.model_copy(update={"engines": ()}),  # no training during which they could evaluate
            "schedule": config.schedule.model_copy(update={"colocate": False}),  # there are no trainers
        }
    )


def _check_loadable(weights: Path, key: str, model: str) -> None:
    """Raises SlimxError if engines cannot load the directory `weights`. `key`: option or configuration key that names
    the directory; `model`: the model's directory, for messages."""
    saved = Saves(weights / "checkpoints", keep=1).newest()  # None unless `weights` is a run
    if saved is not None or format_of(weights) is not None:
        convert = shlex.join(["slimx", "convert", "megatron-to-hf", str(saved or weights), "OUT", "--original", model])
        raise SlimxError(
            f"{key}: {weights} is not in Hugging Face's format, the only format that engines load; convert the "
            f"weights with `{convert}`, or set checkpoint.export_every to export weights during training",
            code="engines.weights",
            about=key,
        )
    if not (weights / "config.json").is_file():
        raise SlimxError(
            f"{key}: {weights} contains no config.json; choose a Hugging Face directory with weights",
            code="engines.weights",
            about=key,
        )
