"""Everything about a run that can be known to be wrong before Ray, trainers or engines start."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from slimx.cluster.connection import device_of
from slimx.config.schema import Config
from slimx.data.prompts import read_prompts
from slimx.data.records import Prompt
from slimx.data.tokens import check_prompts, load_tokenizer
from slimx.engines.server.spec import EngineSpec, server_args
from slimx.errors import SlimxError
from slimx.layout.ranks import Sizes, engine_sizes
from slimx.models.families import ModelSpec, configured_model
from slimx.models.files.megatron_directory import check_fit, is_megatron
from slimx.models.files.reader import CheckpointReader
from slimx.preflight.checks.constraints import batch_problems
from slimx.preflight.checks.exact import check_exact
from slimx.preflight.checks.layout import check_critic_layout, check_layout, critic_keys
from slimx.preflight.checks.serving import check_devices, check_transfer
from slimx.preflight.checks.teacher import check_served_teacher, check_teacher
from slimx.preflight.effects.probe import try_hooks
from slimx.preflight.routing import check_routing
from slimx.reshard.manifest import Encoding
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.publication import export_plan, publication_plan
from slimx.rewards.mixture import Mixture
from slimx.rollout.flow.replay import NO_HOOKS
from slimx.rollout.hook_loading import Hooks, load_hooks
from slimx.trainer.device.backends import Backends, choose_backends, installed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What rollouts are made of."""

    spec: ModelSpec
    hooks: Hooks
    tokenizer: Any
    prompts: list[Prompt]
    """Empty where rollouts are replayed, as `eval_prompts`."""
    eval_prompts: dict[str, list[Prompt]]
    """By name, as `eval.files`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Sources):
    """What the checks of a whole run had to read anyway."""

    sizes: Sizes
    plans: dict[str, Plan]
    """By which weights leave the trainers: "export" and, with engines, "publish"."""
    backends: Backends
    """The trainers' kernels, with the reason of each."""
    encoding: Encoding
    """How the engines receive them."""
    critic: Sizes | None
    """Parallel sizes of the critic, if there is one; those of the trainers where it shares their ranks."""


def check_run(config: Config) -> Prepared:
    """Check configuration against checkpoint, prompts and hooks. Raises SlimxError for the first thing that cannot
    work."""
    device = device_of(config)
    spec = configured_model(config)
    sizes = check_layout(config, spec)
    check_routing(config, spec)
    check_exact(config, spec, device)
    backends = choose_backends(config.trainer, device=device, packages=installed(), exact=config.exact)
    _check_transformer(config, spec, backends, device)
    _check_weights(Path(config.initial_weights), spec)
    critic = _check_critic(config, backends, device) if config.critic is not None else None
    if config.algorithm.teacher:
        check_teacher(config.algorithm.teacher, spec)
    try_hooks(config)
    sources = check_sources(config, spec, device)
    if problems := list(batch_problems(config, spec, sizes, critic)):
        raise SlimxError("; ".join(problems))
    plans = {"export": export_plan(config, spec, sizes)}
    published = publication_plan(config, spec, sizes, device)
    if published is not None:
        plans["publish"] = published.plan
    return Prepared(
        **{each.name: getattr(sources, each.name) for each in fields(sources)},
        sizes=sizes,
        plans=plans,
        backends=backends,
        encoding=published.encoding if published is not None else "hf",
        critic=critic,
    )


def check_sources(config: Config, spec: ModelSpec, device: str) -> Sources:
    """What rollouts are made of: hooks, engines' arguments, tokenizer and prompts. Raises SlimxError for the first that
    cannot work."""
    hooks = NO_HOOKS if config.rollout.replay else load_hooks(config)
    check_devices(config, device)
    for group in config.rollout.served:
        model, sizes_of_engine = group.model or config.model.path, engine_sizes(group)
        server_args(
            EngineSpec(
                group.name,
                model,
                config.numerics.dtype,
                device,
                port=0,
                sizes=sizes_of_engine,
                exact_leaves=None if group.frozen else config.leaves,
                sglang=group.sglang,
            )
        )
        if device == "cuda":
            check_transfer(group)
    tokenizer = load_tokenizer(config.model.path)
    for group in config.rollout.frozen_engines:
        if group.name == config.algorithm.teacher_engine:
            check_served_teacher(group, tokenizer)
    prompts: list[Prompt] = []
    eval_prompts: dict[str, list[Prompt]] = {}
    if not config.rollout.replay:
        prompts = _prompts(config, config.rollout.prompts, tokenizer, spec)
        eval_prompts = {name: _prompts(config, path, tokenizer, spec) for name, path in config.eval.files.items()}
    if isinstance(hooks.reward, Mixture):
        hooks.reward.check([*prompts, *chain.from_iterable(eval_prompts.values())])
    return Sources(spec=spec, hooks=hooks, tokenizer=tokenizer, prompts=prompts, eval_prompts=eval_prompts)


def _check_critic(config: Config, backends: Backends, device: str) -> Sizes:
    """The critic's sizes, if its model can be split like that and its weights fit."""
    settings = config.as_critic()
    spec, sizes = check_critic_layout(config)
    with critic_keys(config):
        _check_transformer(settings, spec, backends, device)
    weights = Path(settings.initial_weights)
    if is_megatron(weights):
        raise SlimxError(
            f"the critic cannot start from {weights}, which is Megatron-LM's; give a Hugging Face directory in "
            "critic.load"
        )
    CheckpointReader(weights).check(spec.table)
    return sizes


def _check_weights(path: Path, spec: ModelSpec) -> None:
    if is_megatron(path):
        check_fit(path, spec.table, prediction=spec.prediction_layers)
    else:
        reader = CheckpointReader(path)
        reader.check(spec.table)
        reader.check_copies(spec.table)


def _check_transformer(config: Config, spec: ModelSpec, backends: Backends, device: str) -> None:
    """Let megatron-core judge the model, the layout and `trainer.megatron` here, not in every trainer rank."""
    with warnings.catch_warnings():
        # megatron-core warns of what this process, which trains nothing, has not installed.
        warnings.simplefilter("ignore")
        from slimx.trainer.model.transformer import transformer_config  # imports megatron-core: 2 seconds

        transformer_config(spec, config, backends, cpu=device == "cpu")


def _prompts(config: Config, path: str, tokenizer: Any, spec: ModelSpec) -> list[Prompt]:
    prompts = read_prompts(path)
    check_prompts(tokenizer, prompts, Path(path), config.rollout.max_prompt_tokens, spec.vocab_size)
    return prompts
