"""A run's flow in virtual time: engines that can be interrupted, random delays, failures, publications and restarts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Group, Prompt, Trajectory
from slimx.data.saved.codec import decode, encode
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.flow.tickets import Dropped, SavedTicket
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import RolloutContext, seed_of
from slimx.rollout.policy import PolicyClient

TURN_TOKENS = 6


class Engine:
    """Samples token by token: the id depends on seed and position alone, the version is that of the moment.

    As SGLang's: an abort ends every request with what it has, or with nothing where it was queued."""

    def __init__(self, random: np.random.Generator, slowest: float = 1.0) -> None:
        self.version, self.random, self.slowest = 0, random, slowest
        self.sampled: dict[tuple[int, int], int] = {}
        """Times that the token of a (seed, position) was sampled."""
        self.out = 0
        self.never: int | None = None
        """Seed of a request that is not answered."""
        self._aborts = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.out += 1
        try:
            return await self._generate(len(request.token_ids), request.sampling["max_new_tokens"], request.seed)
        finally:
            self.out -= 1

    async def _generate(self, prompt: int, count: int, seed: int) -> Completion:
        aborts, versions, reason = self._aborts, [], "stop"
        if seed == self.never:
            await asyncio.Event().wait()
        # One request in ten is a straggler.
        pace = self.slowest * (10 if np.random.default_rng(seed).random() < 0.1 else 1)
        for position in range(prompt, prompt + count):
            await asyncio.sleep(self.random.uniform(0, pace))
            if self._aborts > aborts:
                reason = "abort"
                break
            versions.append(self.version)
            key = (seed, position)
            self.sampled[key] = self.sampled.get(key, 0) + 1
        ids = np.array([token_of(seed, prompt + n) for n in range(len(versions))], np.int32)
        spans = [(n, n + 1, version) for n, version in enumerate(versions)]
        return Completion(ids, np.full(len(ids), -1.0, np.float32), spans, reason, None, 0, 0.0)

    async def abort(self) -> None:
        self._aborts += 1


def token_of(seed: int, position: int) -> int:
    return int(np.random.default_rng([seed, position]).integers(4, 100))


async def two_turns(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    """Two turns with a tool between them; some rollouts give up, as their own seed says."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=0))
    await asyncio.sleep((ctx.seed % 7) / 4)
    if ctx.seed % 29 == 0:
        raise ValueError("an unlucky tool")
    draft.add_inserted([3, 3])
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1))
    return draft.finish()


def keep(group: Group) -> bool | str:
    """Drops a fifth of the groups, the same ones whatever the timing."""
    return "unlucky" if group.trajectories[0].sampling["seed"] % 5 == 0 else True


def kept(config: Config, number: int) -> bool:
    """Returns True if the group of ticket `number` is trained: neither failed nor dropped by `keep`."""
    seeds = [seed_of(config.run.seed, number, index) for index in range(config.rollout.group_size)]
    return seeds[0] % 5 != 0 and all(seed % 29 for seed in seeds)


class Flow:
    """One process of a run, between its start and its end."""

    def __init__(self, config: Config, random: np.random.Generator, prompts: list[Prompt]) -> None:
        self.engine = Engine(random)
        self.maker = GroupMaker(config, Hooks(two_turns, None, keep), {"actor": PolicyClient(self.engine, None)})
        self.dropped: list[Dropped] = []
        source = PromptSource(prompts, 1)
        self.manager = RolloutManager(config, source, self.maker, self.dropped.append, self.engine.abort)

    def publish(self, version: int) -> None:
        self.engine.version = self.maker.version = version

    def saved(self) -> dict[str, Any]:
        """The state as a checkpoint keeps it."""
        state = self.manager.state()
        return state | {"tickets": decode(list[SavedTicket], encode(state["tickets"]))}
