"""Import of the configured hooks, with the checks that they pass before a run starts.

Hooks that were written for another program have a prefix, the name of their form: an entry point (`Form`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.reward import Reward as RewardConfig
from slimx.config.sections.reward import RewardPart
from slimx.data.records import Prompt
from slimx.dotted import load_function
from slimx.errors import SlimxError, written_at
from slimx.rewards import needs
from slimx.rewards.mixture import Mixture, WeightedReward
from slimx.rollout.hooks import Generate, Keep, Reward

GENERATE, REWARDS = GROUPS = "slimx.generate", "slimx.rewards"
"""Groups of entry points: hooks by the names that a configuration has for them."""
FORMS = "slimx.hook_forms"
"""Group of entry points: a `Form` by the prefix of its hooks."""


class Form(Protocol):
    """Hooks of another program, which run as they are."""

    def load_generate(self, path: str, config: Config) -> Generate: ...

    def load_keep(self, path: str, config: Config) -> Keep: ...

    def load_reward(
        self, key: str, path: str, options: Mapping[str, Any], *, group: bool, facts: Mapping[str, Any]
    ) -> Reward:
        """Load the hook at `path`, the value of `key`, in any process; `group`: it judges a whole group."""
        ...

    def facts(self, config: Config) -> dict[str, Any]:
        """Return the facts of a run that `load_reward` needs, as values that JSON can hold."""
        ...

    def is_form_of(self, path: str) -> bool:
        """Return True if the hook at a path without a prefix is of this form."""
        ...


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
    reward = load_reward(config.reward, form_facts(config))
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
    if (found := _form_of(path)) is not None:
        return found[0].load_keep(found[1], config)
    _refuse_without_prefix("rollout.filter", path)
    return load_function("rollout.filter", path, ("group",), is_async=False)


def form_facts(config: Config) -> dict[str, Any]:
    """The facts of a run that its reward hooks need in other processes, by the prefix of their form."""
    paths = (config.reward.function, *(part.function for part in config.reward.parts))
    names = {str(path).partition(":")[0] for path in paths} & entry_points.find(FORMS).keys()
    return {name: entry_points.load(FORMS, name).facts(config) for name in names}


def _form_of(path: str) -> tuple[Form, str] | None:
    """The form of a path's prefix, and the path behind it; None without one."""
    prefix, colon, rest = path.partition(":")
    return (entry_points.load(FORMS, prefix), rest) if colon and prefix in entry_points.find(FORMS) else None


def _refuse_without_prefix(key: str, path: str) -> None:
    for name, form in entry_points.load_all(FORMS).items() if "." in path else ():
        if form.is_form_of(path):
            raise SlimxError(
                f"{key}: {path} is written for {name}; name it as {name}:{path}",
                code="hooks.prefix",
                about=path,
            )


def load_generate(config: Config) -> Generate:
    """The generate hook, its options filled in, asked whether it can work here."""
    if (found := _form_of(config.rollout.generate)) is not None:
        return found[0].load_generate(found[1], config)
    _refuse_without_prefix("rollout.generate", config.rollout.generate)
    options = ("rollout.options", config.rollout.options)
    hook = load_function(
        "rollout.generate", config.rollout.generate, ("ctx", "prompt"), is_async=True, options=options, group=GENERATE
    )
    needs.check(hook)
    return hook


def load_reward(config: RewardConfig, facts: Mapping[str, Any]) -> Reward | None:
    """The reward hook of a configuration, its parts and options filled in; SlimxError as `load_hooks`.

    `facts`: of `form_facts`."""
    if config.parts:
        return Mixture(
            tuple(
                WeightedReward(part.name, _load_reward(f"reward.parts.{number}", part, facts), part.weight, part.where)
                for number, part in enumerate(config.parts)
            )
        )
    return _load_reward("reward", config, facts) if config.function else None


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


def check_generated(generate: Generate, prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Raise SlimxError for the first prompt that the generate hook, with its options, cannot begin."""
    if (check := needs.prompt_check(generate)) is not None:
        options = generate.keywords if isinstance(generate, partial) else {}
        if "tokenizer" in inspect.signature(check).parameters:
            options = {"tokenizer": tokenizer, **options}
        check(prompts, **options)


def name_of(hook: Any) -> str:
    """A hook as an error names it."""
    while isinstance(hook, partial):
        hook = hook.func
    if (name := getattr(hook, "hook_name", None)) is not None:  # of another form
        return name
    if isinstance(hook, Mixture):
        return " + ".join(map(name_of, _parts(hook)))
    path = f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', hook)}"
    names = {
        point.value.replace(":", "."): name for group in GROUPS for name, point in entry_points.find(group).items()
    }
    return names.get(path, path)


def described(hook: Any) -> str:
    """A hook as an error names it, with the place of a user's own."""
    name = name_of(hook)
    while isinstance(hook, partial):
        hook = hook.func
    return name + written_at(hook)


def _parts(reward: Reward) -> list[Reward]:
    return [part.hook for part in reward.parts] if isinstance(reward, Mixture) else [reward]


def _load_reward(key: str, config: RewardConfig | RewardPart, facts: Mapping[str, Any]) -> Reward:
    path = str(config.function)
    if (found := _form_of(path)) is not None:
        group, prefix = _scope(config) == "group", path.partition(":")[0]
        return found[0].load_reward(key, found[1], config.options, group=group, facts=facts[prefix])
    _refuse_without_prefix(f"{key}.function", path)
    scope = _scope(config)
    hook = load_function(
        f"{key}.function",
        config.function,
        ("ctx", scope),
        is_async=True,
        options=(f"{key}.options", config.options),
        group=REWARDS,
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
