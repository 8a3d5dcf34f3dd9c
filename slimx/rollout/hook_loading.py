"""Import of the configured hooks, with the checks that they pass before a run starts.

Hooks of slime's form have the prefix `slime:` (slimx.adapters.slime).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimx.adapters.slime import hooks as slime
from slimx.config.schema import Config
from slimx.config.sections.reward import Reward as RewardConfig
from slimx.config.sections.reward import RewardPart
from slimx.data.records import Prompt
from slimx.dotted import load_function
from slimx.errors import SlimxError, written_at
from slimx.rewards import needs
from slimx.rewards.mixture import Mixture, WeightedReward
from slimx.rollout.hooks import Generate, Keep, Reward


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one run."""

    generate: Generate
    reward: Reward | None
    keep: Keep | None


def load_hooks(config: Config) -> Hooks:
    """Import and check the configured hooks. Raises SlimxError naming the key, the path and what is wrong."""
    return Hooks(generate=load_generate(config), reward=load_rewards(config), keep=load_keep(config))


def load_rewards(config: Config) -> Reward | None:
    """The reward hook, checked and asked whether it can work here; None where there is none."""
    reward = load_reward(config.reward, slime.RunFacts.of(config))
    if reward is not None:
        in_process(config.reward, reward)
        for hook in _parts(reward):
            needs.check(hook)
    return reward


def load_keep(config: Config) -> Keep | None:
    """The group filter; None where there is none."""
    path = config.rollout.filter
    if path is None:
        return None
    if path.startswith(slime.PREFIX):
        return slime.KeepHook.load(config)
    _refuse_slime("rollout.filter", path)
    return load_function("rollout.filter", path, ("group",), is_async=False)


def _refuse_slime(key: str, path: str) -> None:
    if slime.written_for_slime(path):
        raise SlimxError(
            f"{key}: {path} is written for slime; name it as {slime.PREFIX}{path}",
            code="hooks.slime_prefix",
            about=path,
        )


def load_generate(config: Config) -> Generate:
    """The generate hook, its options filled in, asked whether it can work here."""
    if config.rollout.generate.startswith(slime.PREFIX):
        return slime.GenerateHook.load(config)
    _refuse_slime("rollout.generate", config.rollout.generate)
    options = ("rollout.options", config.rollout.options)
    hook = load_function("rollout.generate", config.rollout.generate, ("ctx", "prompt"), is_async=True, options=options)
    needs.check(hook)
    return hook


def load_reward(config: RewardConfig, run: slime.RunFacts) -> Reward | None:
    """The reward hook of a configuration, its parts and options filled in; SlimxError as `load_hooks`.

    `run`: what hooks of slime's form are told."""
    if config.parts:
        return Mixture(
            tuple(
                WeightedReward(part.name, _load_reward(f"reward.parts.{number}", part, run), part.weight, part.where)
                for number, part in enumerate(config.parts)
            )
        )
    return _load_reward("reward", config, run) if config.function else None


def in_process(config: RewardConfig, reward: Reward) -> bool:
    """Returns True if `reward` is called in processes (`reward.isolation`). SlimxError where a hook refuses threads."""
    needing = [name_of(hook) for hook in _parts(reward) if needs.asks_for_process(hook)]
    if config.isolation == "thread" and needing:
        raise SlimxError(
            f"reward.isolation is thread, but {needing[0]} computes for long without awaiting and could not be ended "
            "there at its deadline; set reward.isolation=auto",
            code="hooks.isolation",
            about="reward.isolation",
        )
    return config.isolation == "process" or bool(needing)


def check_answers(config: RewardConfig, reward: Reward, prompts: Sequence[Prompt], share: float) -> None:
    """Raise SlimxError where more than this share of `prompts` lack the answer that a reward of slimx compares with."""
    fitting = [(part.hook, part.fits) for part in reward.parts] if isinstance(reward, Mixture) else [(reward, None)]
    for hook, fits in fitting:
        if not needs.asks_for_answer(hook):
            continue
        lacking = [each for each in prompts if each.answer is None and (fits is None or fits(each))]
        if len(lacking) > share * len(prompts):
            key = "reward.parts" if config.parts else "reward.function"
            raise SlimxError(
                f"{key}: {name_of(hook)} compares with answers, and {len(lacking)} of {len(prompts)} prompts have none "
                f"(the first is {lacking[0].id!r}); name their column in rollout.fields.answer, or another {key}",
                code="reward.answer",
                about=lacking[0].id,
            )


def check_prompts(reward: Reward, prompts: Sequence[Prompt]) -> None:
    """Raise SlimxError for the first prompt that the reward which will judge it refuses."""
    fitting = [(part.hook, part.fits) for part in reward.parts] if isinstance(reward, Mixture) else [(reward, None)]
    for hook, fits in fitting:
        if (check := needs.prompt_check(hook)) is not None:
            check(prompt for prompt in prompts if fits is None or fits(prompt))


def check_generated(generate: Generate, prompts: Sequence[Prompt]) -> None:
    """Raise SlimxError for the first prompt that the generate hook, with its options, cannot begin."""
    if (check := needs.prompt_check(generate)) is not None:
        check(prompts, **(generate.keywords if isinstance(generate, partial) else {}))


def name_of(hook: Any) -> str:
    """A hook as an error names it."""
    while isinstance(hook, partial):
        hook = hook.func
    if isinstance(hook, slime.RewardHook):
        return hook.path
    if isinstance(hook, Mixture):
        return " + ".join(map(name_of, _parts(hook)))
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', hook)}"


def described(hook: Any) -> str:
    """A hook as an error names it, with the place of a user's own."""
    name = name_of(hook)
    while isinstance(hook, partial):
        hook = hook.func
    return name + written_at(hook)


def _parts(reward: Reward) -> list[Reward]:
    return [part.hook for part in reward.parts] if isinstance(reward, Mixture) else [reward]


def _load_reward(key: str, config: RewardConfig | RewardPart, run: slime.RunFacts) -> Reward:
    if str(config.function).startswith(slime.PREFIX):
        group = _scope(config) == "group"
        return slime.RewardHook.load(key, str(config.function), config.options, group=group, run=run)
    _refuse_slime(f"{key}.function", str(config.function))
    scope = _scope(config)
    hook = load_function(
        f"{key}.function", config.function, ("ctx", scope), is_async=True, options=(f"{key}.options", config.options)
    )
    second = list(inspect.signature(hook).parameters)[1:2]
    if second == ["trajectory" if scope == "group" else "group"]:
        raise SlimxError(
            f"{key}.function: {config.function} judges a {second[0]}; set reward.scope={second[0]}",
            code="hooks.scope",
            about="reward.scope",
        )
    return hook


def _scope(config: RewardConfig | RewardPart) -> str:
    return config.scope if isinstance(config, RewardConfig) else "trajectory"
