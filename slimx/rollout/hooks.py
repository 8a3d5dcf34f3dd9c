"""What a user writes: the hooks, what they receive, and the checks that they pass before a run starts.

async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory | list[Trajectory]
async def reward(ctx: RewardContext, trajectory: Trajectory) -> float | dict[str, float]
async def reward(ctx: RewardContext, group: Group) -> list[float | dict[str, float]]     # reward.scope: group
def keep(group: Group) -> bool | str

Hooks of slime's form have the prefix `slime:` (slimx.adapters.slime_hooks).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slimx.adapters.slime_hooks import hooks as slime
from slimx.config.reward import Reward as RewardConfig
from slimx.config.reward import RewardPart
from slimx.config.schema import Config
from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.tokens import PromptIds, encode_turn
from slimx.dotted import load_function
from slimx.errors import SlimxError
from slimx.rewards import needs
from slimx.rewards.mixture import Mixture, Part
from slimx.rollout.completion import Completion
from slimx.rollout.draft import Draft
from slimx.rollout.environment_processes import Environments
from slimx.rollout.frozen import FrozenEngine
from slimx.rollout.sampling import checked_sampling
from slimx.rollout.stream import TokenStream

if TYPE_CHECKING:
    from slimx.rollout.proxy import ChatProxy


class GivenUp(SlimxError):
    """Raised by a generate hook that gives its rollout up: counted under `reason`."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


class Generator(Protocol):
    """What a rollout needs of an engine."""

    async def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any], seed: int, return_routed_experts: bool = False
    ) -> Completion: ...

    def stream(
        self, token_ids: Sequence[int], sampling: dict[str, Any], seed: int, return_routed_experts: bool = False
    ) -> AbstractAsyncContextManager[TokenStream]: ...


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """The engines as one rollout sees them: its own sampling parameters and seed are filled in."""

    client: Generator | None
    sampling: dict[str, Any]
    seed: int
    routed_experts: bool

    async def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any] | None = None, *, turn: int = 0
    ) -> Completion:
        """Continue `token_ids`. `sampling` overrides single parameters; give each turn its number, so that its seed
        differs."""
        return await self._client().generate(token_ids, *self._request(sampling, turn))

    def stream(
        self, token_ids: Sequence[int], sampling: dict[str, Any] | None = None, *, turn: int = 0
    ) -> AbstractAsyncContextManager[TokenStream]:
        """As `generate`, but the tokens can be read while they are sampled:

        async with ctx.engine.stream(draft.token_ids) as stream:
            async for piece in stream:  # a Completion of the new tokens
                ...
        draft.add_sampled(stream.completion)
        """
        return self._client().stream(token_ids, *self._request(sampling, turn))

    def _request(self, sampling: dict[str, Any] | None, turn: int) -> tuple[dict[str, Any], int, bool]:
        own = checked_sampling(sampling) if sampling else {}
        return {**self.sampling, **own}, seed_of(self.seed, turn), self.routed_experts

    def _client(self) -> Generator:
        if self.client is None:
            raise SlimxError(
                "this run has no engines (rollout.engines is empty), but its generate hook asked for a completion"
            )
        return self.client


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """One rollout of one prompt."""

    engine: RolloutEngine
    tokenizer: Any
    """The model's Hugging Face tokenizer."""
    version: int
    """Newest weight version when the rollout began."""
    evaluation: bool
    """True in an evaluation: sampling is greedy and nothing is trained."""
    seed: int
    """Differs for every rollout, the same in a resumed run."""
    group_id: str
    index: int
    """Number of the rollout in its group."""
    engines: Mapping[str, FrozenEngine] = field(default_factory=dict)
    """Frozen groups of `rollout.engines`, by name."""
    address: str = ""
    """URL of the policy's router; "" where there is none. `engine` is the way to tokens that can be trained."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers of requests to `address`, which answers nobody without them."""
    proxy: ChatProxy | None = None
    """The run's OpenAI-compatible server (slimx.rollout.agent); None where nothing is sampled."""
    environments: Environments = field(default_factory=Environments)
    """Makes environments, in the driver or in processes."""
    prompt_ids: PromptIds | None = None
    """Of the group: its prompt is encoded once."""

    def draft(self, prompt: Prompt | Sequence[int], *, suffix: str = "") -> Draft:
        """Begin a trajectory with the prompt's tokens; `suffix` tells several trajectories of one rollout apart."""
        ids = (self.prompt_ids or PromptIds(self.tokenizer)).of(prompt) if isinstance(prompt, Prompt) else prompt
        rollout = f"{self.group_id}/{self.index}"
        return Draft(
            ids,
            id=rollout + suffix,
            rollout_id=rollout,
            group_id=self.group_id,
            index=self.index,
            seed=self.seed,
            sampling=self.engine.sampling,
        )

    def turn(self, content: str, *, after: Sequence[int], role: str = "user") -> list[int]:
        """Token ids of a turn that the model did not sample, up to where its next one begins; `after`: all tokens so
        far."""
        return encode_turn(self.tokenizer, content, role=role, after=after)


@dataclass(frozen=True, slots=True)
class RewardContext:
    """One trajectory to be judged, or one group."""

    prompt: Prompt
    tokenizer: Any
    text: str
    """The sampled tokens as text, special tokens left out; of a group, those of its first trajectory."""
    evaluation: bool
    engines: Mapping[str, FrozenEngine] = field(default_factory=dict)
    """Frozen groups of `rollout.engines`, by name: a judge, a reward model."""
    texts: list[str] = field(default_factory=list)
    """`text` of each trajectory that is judged."""


Generate = Callable[[RolloutContext, Prompt], Awaitable[Trajectory | list[Trajectory]]]
Value = float | dict[str, float]
Reward = Callable[[RewardContext, Any], Awaitable[Value | list[Value]]]
Keep = Callable[[Group], bool | str]


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
    path = config.rollout.keep
    if path is None:
        return None
    if path.startswith(slime.PREFIX):
        return slime.KeepHook.load(config)
    _refuse_slime("rollout.keep", path)
    return load_function("rollout.keep", path, ("group",), is_async=False)


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
                Part(part.name, _load_reward(f"reward.parts.{number}", part, run), part.weight, part.where)
                for number, part in enumerate(config.parts)
            )
        )
    return _load_reward("reward", config, run) if config.function else None


def in_process(config: RewardConfig, reward: Reward) -> bool:
    """Whether calls of `reward` run in processes (`reward.isolation`). SlimxError where a hook refuses threads."""
    needing = [name_of(hook) for hook in _parts(reward) if needs.asks_for_process(hook)]
    if config.isolation == "thread" and needing:
        raise SlimxError(
            f"reward.isolation is thread, but {needing[0]} computes for long without awaiting and could not be ended "
            "there at its deadline; set reward.isolation=auto"
        )
    return config.isolation == "process" or bool(needing)


def name_of(hook: Any) -> str:
    """A hook as an error names it."""
    while isinstance(hook, partial):
        hook = hook.func
    if isinstance(hook, slime.RewardHook):
        return hook.path
    if isinstance(hook, Mixture):
        return " + ".join(map(name_of, _parts(hook)))
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', hook)}"


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
        raise SlimxError(f"{key}.function: {config.function} judges a {second[0]}; set reward.scope={second[0]}")
    return hook


def _scope(config: RewardConfig | RewardPart) -> str:
    return config.scope if isinstance(config, RewardConfig) else "trajectory"


def seed_of(*parts: int) -> int:
    """A sampling seed in [0, 2^31) from numbers, the same on every machine."""
    return int(np.random.SeedSequence([part & 0xFFFFFFFF for part in parts]).generate_state(1)[0] >> 1)
