"""Imports the configured hooks and checks them before a run starts.

A hook that was written for another framework, such as slime, is named with a prefix. The entry point with the name of
the prefix provides the `Form`, the adapter that loads such hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.reward import Reward as RewardConfig
from slimx.config.sections.reward import RewardPart
from slimx.data.records import Prompt
from slimx.dotted import is_async_function, load_function
from slimx.errors import SlimxError, written_at
from slimx.json_types import Json
from slimx.rewards import needs
from slimx.rewards.mixture import Mixture, WeightedReward
from slimx.rollout.hooks import Generate, Keep, Reward, RewardContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATE = "slimx.generate"
"""Entry point group that registers generate hooks under short names for `rollout.generate`."""
REWARDS = "slimx.rewards"
"""Entry point group that registers reward hooks under short names for `reward.function`."""
FORMS = "slimx.hook_forms"
"""Entry point group that registers adapters for hooks of other frameworks (`Form`), each under the prefix of its
hooks."""

PLAIN = "slimx.plain_hooks"
"""Entry point group with the classes that make async hooks of plain functions, by hook."""


class Form(Protocol):
    """Adapter that loads hooks written for another framework, such as slime, without changes to them."""

    def load_generate(self, path: str, config: Config) -> Generate: ...

    def load_keep(self, path: str, config: Config) -> Keep: ...

    def load_reward(
        self, key: str, path: str, options: Mapping[str, object], *, group: bool, facts: Mapping[str, Json]
    ) -> Reward:
        """Loads the reward hook at `path`, in the driver or in another process.

        `key`: configuration key with the path, for error messages. `group`: True if the hook computes the rewards of a
        group. `facts`: properties of the run that the hook needs, as returned by `Form.facts`.
        """

    def facts(self, config: Config) -> Json:
        """Returns the properties of the run that `load_reward` needs, as JSON values."""

    def is_form_of(self, path: str) -> bool:
        """Returns True if the hook at `path`, which has no framework prefix, was written for this adapter's
        framework."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one run; an optional hook is None if it is not configured."""

    generate: Generate
    reward: Reward | None
    keep: Keep | None


def load_hooks(config: Config) -> Hooks:
    """Imports and checks the configured hooks. Raises SlimxError, naming the configuration key and the hook's path, if
    a hook cannot be imported or called."""
    return Hooks(generate=load_generate(config), reward=load_rewards(config), keep=load_keep(config))


def load_rewards(config: Config) -> Reward | None:
    """Returns the reward hook after checking its requirements, or None if none is configured."""
    reward = load_reward(config.reward, form_facts(config))
    if reward is not None:
        in_process(config.reward, reward)
        for hook in _parts(reward):
            needs.check(hook)
    return reward


def load_keep(config: Config) -> Keep | None:
    """Returns the group filter, or None if none is configured."""
    path = config.rollout.filter
    if path is None:
        return None
    foreign = _form_of(path)
    if foreign is not None:
        return foreign.form.load_keep(foreign.path, config)
    _refuse_without_prefix("rollout.filter", path)
    return load_function("rollout.filter", path, ("group",))


def form_facts(config: Config) -> dict[str, Json]:
    """Returns the properties of the run that reward hooks of other frameworks need in worker processes, keyed by the
    prefix of each framework's `Form`."""
    paths = (config.reward.function, *(part.function for part in config.reward.parts))
    names = {str(path).partition(":")[0] for path in paths} & entry_points.find(FORMS).keys()
    return {name: entry_points.load(FORMS, name).facts(config) for name in names}


class _Foreign(NamedTuple):
    """A hook written for another framework: the framework's `Form`, and the hook's prefix and path."""

    form: Form
    prefix: str
    path: str
    """Dotted path of the hook, without the prefix."""


def _form_of(path: str) -> _Foreign | None:
    """Splits the path of a hook into the prefix of a `Form` and the rest. Returns None if the path has no such
    prefix."""
    prefix, colon, rest = path.partition(":")
    if not colon or prefix not in entry_points.find(FORMS):
        return None
    return _Foreign(entry_points.load(FORMS, prefix), prefix, rest)


def _refuse_without_prefix(key: str, path: str) -> None:
    if "." not in path:
        return
    for name, form in entry_points.load_all(FORMS).items():
        if form.is_form_of(path):
            raise SlimxError(
                f"{key}: the hook {path} is written for {name}, but its path lacks this prefix; set "
                f"{key}={name}:{path}",
                code="hooks.prefix",
                about=path,
            )


def load_generate(config: Config) -> Generate:
    """Returns the generate hook with its options, after checking its requirements."""
    path = config.rollout.generate
    foreign = _form_of(path)
    if foreign is not None:
        return foreign.form.load_generate(foreign.path, config)
    _refuse_without_prefix("rollout.generate", path)
    options = ("rollout.options", config.rollout.options)
    hook = load_function("rollout.generate", path, ("ctx", "prompt"), options=options, group=GENERATE)
    needs.check(hook)
    return hook if is_async_function(hook) else entry_points.load(PLAIN, "generate")(hook)


def load_reward(config: RewardConfig, facts: Mapping[str, Json]) -> Reward | None:
    """Returns the configured reward hook with its options, or the mixture of `reward.parts`; None if no reward is
    configured. Raises SlimxError if a hook cannot be loaded.

    `facts`: return value of `form_facts`, the properties of the run that hooks of other frameworks need.
    """
    if config.parts:
        parts: list[WeightedReward[RewardContext]] = []
        for index, part in enumerate(config.parts):
            hook = _load_reward(f"reward.parts.{index}", part, facts)
            parts.append(WeightedReward(part.name, hook, part.weight, part.where))
        return Mixture(tuple(parts))
    if not config.function:
        return None
    return _load_reward("reward", config, facts)


def in_process(config: RewardConfig, reward: Reward) -> bool:
    """Returns True if `reward` runs in worker processes, as decided by `reward.isolation` and the hook's requirements.

    Raises SlimxError if `reward.isolation` is thread and a hook cannot run in a thread.
    """
    needing = [name_of(hook) for hook in _parts(reward) if needs.asks_for_process(hook)]
    if config.isolation == "thread" and needing:
        raise SlimxError(
            f"reward.isolation is thread, but hook {needing[0]} may compute without awaiting, and a thread that does "
            "so cannot be stopped at reward.deadline; set reward.isolation=auto",
            code="hooks.isolation",
            about="reward.isolation",
        )
    return config.isolation == "process" or bool(needing)


def check_answers(config: RewardConfig, reward: Reward, prompts: Sequence[Prompt], share: float) -> None:
    """Raises SlimxError if a reward hook compares responses with the prompts' answers, but too many of its `prompts`
    have none.

    `share`: maximum fraction of prompts without an answer.
    """
    for hook, judged in _judged_by(reward, prompts):
        if not needs.asks_for_answer(hook):
            continue
        lacking = [prompt for prompt in judged if prompt.answer is None]
        if len(lacking) > share * len(prompts):
            key = "reward.parts" if config.parts else "reward.function"
            raise SlimxError(
                f"{key}: {name_of(hook)} needs the prompts' answers, which are missing in {len(lacking)} of "
                f"{len(prompts)} (the first is {lacking[0].id!r}); set rollout.fields.answer to the column with the "
                f"answers, or use another hook in {key}",
                code="reward.answer",
                about=lacking[0].id,
            )


def check_prompts(reward: Reward, prompts: Sequence[Prompt]) -> None:
    """Raises SlimxError for the first prompt that its reward hook refuses."""
    for hook, judged in _judged_by(reward, prompts):
        check = needs.prompt_check(hook)
        if check is not None:
            check(judged)


def _judged_by(reward: Reward, prompts: Sequence[Prompt]) -> list[tuple[Reward, list[Prompt]]]:
    """Returns each reward hook, including those that are parts of a mixture, with the prompts that it applies to."""
    if not isinstance(reward, Mixture):
        return [(reward, list(prompts))]
    return [(part.hook, list(filter(part.fits, prompts))) for part in reward.parts]


def check_generated(generate: Generate, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises SlimxError for the first prompt that the generate hook, with its configured options, refuses."""
    check = needs.prompt_check(generate)
    if check is not None:
        options = generate.keywords if isinstance(generate, partial) else {}
        if "tokenizer" in inspect.signature(check).parameters:
            options = {"tokenizer": tokenizer, **options}
        check(prompts, **options)


def name_of(hook: object) -> str:
    """Returns the name of a hook for error messages: its configured name if it has one, otherwise its dotted path."""
    while isinstance(hook, partial):
        hook = hook.func
    name = getattr(hook, "hook_name", None)
    if name is not None:  # a hook of another program
        return name
    if isinstance(hook, Mixture):
        return " + ".join(map(name_of, _parts(hook)))
    path = f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', hook)}"
    for group in (GENERATE, REWARDS):
        for name, point in entry_points.find(group).items():
            if point.value.replace(":", ".") == path:
                return name
    return path


def name_with_source(hook: object) -> str:
    """Returns the name of a hook for error messages, followed by file and line if it is a user's hook."""
    name = name_of(hook)
    while isinstance(hook, partial):
        hook = hook.func
    return name + written_at(hook)


def _parts(reward: Reward) -> list[Reward]:
    if isinstance(reward, Mixture):
        return [part.hook for part in reward.parts]
    return [reward]


def _load_reward(key: str, config: RewardConfig | RewardPart, facts: Mapping[str, Json]) -> Reward:
    path = str(config.function)
    scope = _scope(config)
    foreign = _form_of(path)
    if foreign is not None:
        group = scope == "group"
        return foreign.form.load_reward(key, foreign.path, config.options, group=group, facts=facts[foreign.prefix])
    _refuse_without_prefix(f"{key}.function", path)
    hook = load_function(
        f"{key}.function",
        path,
        ("ctx", scope),
        options=(f"{key}.options", config.options),
        group=REWARDS,
    )
    second = list(inspect.signature(hook).parameters)[1:2]
    if second == ["trajectory" if scope == "group" else "group"]:
        raise SlimxError(
            f"{key}.function: {config.function} takes a {second[0]}, but reward.scope is {scope}; set "
            f"reward.scope={second[0]}",
            code="hooks.scope",
            about="reward.scope",
        )
    return hook if is_async_function(hook) else entry_points.load(PLAIN, "reward")(hook)


def _scope(config: RewardConfig | RewardPart) -> str:
    return config.scope if isinstance(config, RewardConfig) else "trajectory"
