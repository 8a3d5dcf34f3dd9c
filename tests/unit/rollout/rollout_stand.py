"""Shared by the tests of rollouts: a manager over an engine in this process, with the quickstart's own tokenizer."""

from __future__ import annotations

import asyncio
import functools
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimx.config.schema import Config
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Prompt, Trajectory
from slimx.rollout import single_turn
from slimx.rollout.client.completion import Completion
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.rollouts import GroupMaker, GroupOutcome
from slimx.rollout.flow.tickets import Batch, Dropped
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import Generate, Keep, Reward, RewardContext, RolloutContext, RolloutEngine
from slimx.rollout.policy import PolicyClient

TOOL = Path(__file__).resolve().parents[3] / "slimx/extras/quickstart" / "make_model.py"


@functools.cache
def the_tokenizer() -> Any:
    return runpy.run_path(str(TOOL))["make_tokenizer"]()


def config_of(**rollout: Any) -> Config:
    """Returns a run of 4 groups of 2 a step, with keys of a section (`reward__deadline`) or else of `rollout`."""
    sections: dict[str, dict[str, Any]] = {"rollout": {"prompts": "p", "prompts_per_step": 4, "group_size": 2}}
    for key, value in rollout.items():
        section, _, name = key.rpartition("__")
        sections.setdefault(section or "rollout", {})[name] = value
    return Config.model_validate({"run": {"dir": "d"}, "model": {"path": "m"}, **sections})


def prompts() -> list[Prompt]:
    return [Prompt(id=f"p{n}", messages=[{"role": "user", "content": f"{n}+1="}], answer=str(n + 1)) for n in range(64)]


class FakeEngine:
    """Three tokens that depend on the seed alone; one by the version at the start, two by the version at the end."""

    def __init__(self, delay: float = 0.0, seed: int = 0) -> None:
        self.version, self.delay, self.random = 0, delay, np.random.default_rng(seed)
        self.requests: list[GenerationRequest] = []
        self.busy = self.busiest = self.retried = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        began = self.version
        try:
            await asyncio.sleep(self.random.uniform(0, self.delay) if self.delay else 0)
        finally:
            self.busy -= 1
        ids = np.random.default_rng(request.seed).integers(4, 100, 3).astype(np.int32)
        spans = [(0, 3, began)] if began == self.version else [(0, 1, began), (1, 3, self.version)]
        return Completion(ids, np.full(3, -1.0, np.float32), spans, "stop", None, 0, 0.01, policy=request.policy)


class Stand:
    """A manager with what it works on, stopped at the end of `async with`."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Any = None,
        generate: Generate = single_turn.generate,
        reward: Reward | None = None,
        keep: Keep | None = None,
        engine: FakeEngine | None = None,
    ) -> None:
        self.engine = engine or FakeEngine()
        tokenizer = tokenizer or the_tokenizer()
        policy = PolicyClient(self.engine, tokenizer, len(the_tokenizer()))
        self.maker = GroupMaker(config, Hooks(generate, reward, keep), {"actor": policy})
        self.dropped: list[Dropped] = []
        self.outcomes: dict[str, GroupOutcome] = {}
        """Outcomes that the maker returned, by group."""
        make = self.maker.make

        async def kept(prompt: Prompt, **arguments: Any) -> GroupOutcome:
            outcome = self.outcomes[arguments["group_id"]] = await make(prompt, **arguments)
            return outcome

        self.maker.make = kept
        self.manager = RolloutManager(config, PromptSource(prompts(), 1), self.maker, self.dropped.append)

    def publish(self, version: int) -> None:
        self.engine.version = self.maker.version = version

    async def next_batch(self) -> Batch:
        return await self.manager.next_batch()

    async def __aenter__(self) -> Stand:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.stop()


def ids_of(batches: Sequence[Batch]) -> list[str]:
    return [group.id for batch in batches for group in batch.groups]


def rollout_context(
    engine: Any, sampling: dict[str, Any], *, seed: int = 5, routed: bool = False, **fields: Any
) -> RolloutContext:
    """Returns the context of a training rollout; `fields`: those of the context that differ."""
    return RolloutContext(
        engine=RolloutEngine(engine, sampling, seed, routed),
        evaluation=False,
        seed=seed,
        **{"tokenizer": the_tokenizer(), "version": 0, "group_id": "g0", "index": 0} | fields,
    )


async def one(ctx: RewardContext, trajectory: Trajectory) -> float:
    return 1.0
