"""What a user writes: the hooks, what they receive, and the checks that they pass before a run starts.

async def generate(ctx: RolloutContext, prompt: Prompt) -> Trajectory | list[Trajectory]
async def reward(ctx: RewardContext, trajectory: Trajectory) -> float | dict[str, float]
def keep(group: Group) -> bool | str
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slimx.config.schema import Config
from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.tokens import encode_prompt
from slimx.errors import SlimxError
from slimx.rollout.client import Completion
from slimx.rollout.draft import Draft


class Generator(Protocol):
    """What a rollout needs of an engine."""

    async def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any], seed: int, return_routed_experts: bool = False
    ) -> Completion: ...


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
        if self.client is None:
            raise SlimxError(
                "this run has no engines (rollout.engines is empty), but its generate hook asked for a completion"
            )
        seed = seed_of(self.seed, turn)
        return await self.client.generate(token_ids, {**self.sampling, **(sampling or {})}, seed, self.routed_experts)


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

    def draft(self, prompt: Prompt | Sequence[int], *, suffix: str = "") -> Draft:
        """Begin a trajectory with the prompt's tokens; `suffix` tells several trajectories of one rollout apart."""
        ids = encode_prompt(self.tokenizer, prompt) if isinstance(prompt, Prompt) else prompt
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


@dataclass(frozen=True, slots=True)
class RewardContext:
    """One trajectory to be judged."""

    prompt: Prompt
    tokenizer: Any
    text: str
    """The sampled tokens as text, special tokens left out."""
    evaluation: bool


Generate = Callable[[RolloutContext, Prompt], Awaitable[Trajectory | list[Trajectory]]]
Reward = Callable[[RewardContext, Trajectory], Awaitable[float | dict[str, float]]]
Keep = Callable[[Group], bool | str]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one run."""

    generate: Generate
    reward: Reward | None
    keep: Keep | None


def load_hooks(config: Config) -> Hooks:
    """Import and check the configured hooks. Raises SlimxError naming the key, the path and what is wrong."""
    reward, keep = config.reward.function, config.rollout.keep
    return Hooks(
        generate=_load("rollout.generate", config.rollout.generate, ("ctx", "prompt"), is_async=True),
        reward=_load("reward.function", reward, ("ctx", "trajectory"), is_async=True) if reward else None,
        keep=_load("rollout.keep", keep, ("group",), is_async=False) if keep else None,
    )


def _load(key: str, path: str, parameters: tuple[str, ...], *, is_async: bool) -> Any:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise SlimxError(f"{key} is {path!r}: give a dotted path such as package.module.function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SlimxError(f"{key}: {path} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    except (Exception, SystemExit) as error:
        raise SlimxError(f"{key}: importing {module_name} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise SlimxError(f"{key}: module {module_name} has no function {name}")
    shape = f"{'async ' if is_async else ''}def {name}({', '.join(parameters)})"
    if not callable(function):
        raise SlimxError(f"{key}: {path} is a {type(function).__name__}; write {shape}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise SlimxError(
            f"{key}: {path}{inspect.signature(function)} cannot be called ({error}); write {shape}"
        ) from error
    # A partial and a function say so themselves, an object with an async __call__ through that.
    called = getattr(function, "__call__", function)  # noqa: B004
    if (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)) != is_async:
        raise SlimxError(f"{key}: {path} must{'' if is_async else ' not'} be async; write {shape}")
    return function


def seed_of(*parts: int) -> int:
    """A sampling seed in [0, 2^31) from numbers, the same on every machine."""
    return int(np.random.SeedSequence([part & 0xFFFFFFFF for part in parts]).generate_state(1)[0] >> 1)
