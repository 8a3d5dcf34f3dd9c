"""A trainer and a server that alternate on one device, with everything that a run moves between them: the loop without
Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slimx.algorithms.advantages.estimate import group_advantages
from slimx.config.schema import Config
from slimx.data.records import Group, Prompt, Trajectory
from slimx.engines.server.engine import Engine
from slimx.engines.server.spec import engine_spec
from slimx.extras.planner.links.rehearsal import OnlyOne
from slimx.layout.ranks import sizes_of
from slimx.models.families import configured_model
from slimx.orchestration.batches import make_packer, make_update_rows
from slimx.reshard.manifest import Publication
from slimx.reshard.parties import LocalRecipient
from slimx.reshard.plan.publication import publication_plan
from slimx.reshard.publish import Publisher
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.draft import Draft
from tools.gpu.trainer import Trainer
from tools.steps import Failed

GROUPS, GROUP_SIZE = 8, 8
SAMPLING = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}


class _Recipient(LocalRecipient):
    """The engine as a recipient of publications."""

    def __init__(self, engine: Engine):
        self.engine, self.name, self.incarnation = engine, engine.spec.name, 1

    async def perform(self, verb: str, epoch: int, *arguments: Any) -> Any:
        return await getattr(self.engine, verb)(*arguments)


@dataclass(frozen=True)
class Sampled:
    """The rollouts of one sampling round."""

    groups: list[Group]
    seconds: float

    @property
    def trajectories(self) -> list[Trajectory]:
        """All rollouts, group after group."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(int(trajectory.loss_mask.sum()) for trajectory in self.trajectories)


class Pair:
    """A policy's trainer and its engine."""

    def __init__(self, config: Config, device: str, out: Path):
        """Starts the trainer. `out`: directory of the logs."""
        self.config, self.device, self.out = config, device, out
        self.spec, self.sizes = configured_model(config), sizes_of(config.trainer)
        planned = publication_plan(config, self.spec, self.sizes, device)
        assert planned is not None
        self.encoding = planned.encoding
        self.trainer = Trainer(config, planned.plan, out / f"trainer-{config.numerics.mode}.log", device)
        self.engine: Engine | None = None

    async def start_engine(self, name: str, arguments: dict[str, Any], deadline_s: float) -> list[dict[str, Any]]:
        """Replaces the running server by a new one; returns the attestation of its ranks. `arguments`: arguments of
        SGLang."""
        await self.stop_engine()
        group = self.config.served.policy[0]
        spec = engine_spec(self.config, group, name, device=self.device, moe=True)
        self.engine = Engine(replace(spec, sglang=spec.sglang | arguments), self.out / f"engine-{name}.log")
        return (await self.engine.start(deadline_s))[1]

    async def stop_engine(self) -> None:
        """Kills the server: SGLang would wait 8 s to drain requests, of which there are none."""
        if self.engine is not None:
            await self.engine.stop(grace_s=0.0)
            self.engine = None

    async def publish(self, version: int) -> Publication:
        """Publishes the trainer's weights. Raises Failed unless the engine accepted and verified all of them."""
        options = self.config.publish
        publisher = Publisher(
            self.trainer,
            OnlyOne(_Recipient(self.engine)),
            deadline_s=options.deadline,
            step_deadline_s=options.engine_deadline,
            staging=options.staging,
            encoding=self.encoding,
        )
        done = await publisher.publish(version, trainer_step=version)
        verified = done.engines[self.engine.spec.name].tensors
        if not verified or verified != done.tensors:
            raise Failed(f"{verified} of {done.tensors} tensors were verified")
        return done

    async def sample(self) -> Sampled:
        """Samples GROUPS x GROUP_SIZE rollouts concurrently, with the same seeds each time."""
        began, shape = time.monotonic(), ModelShape.of(self.spec)
        api_key = self.engine.spec.keys.api_key
        async with GenerationClient(self.engine.spec.url, shape, api_key=api_key, retries=0) as client:
            every = [(group, index) for group in range(GROUPS) for index in range(GROUP_SIZE)]
            rollouts = await asyncio.gather(*(self._rollout(client, *place) for place in every))
        seconds = time.monotonic() - began
        groups = []
        for number in range(GROUPS):
            members = rollouts[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]
            groups.append(Group(id=str(number), prompt=Prompt(id=str(number), token_ids=[1]), trajectories=members))
        return Sampled(groups, seconds)

    async def _rollout(self, client: GenerationClient, group: int, index: int) -> Trajectory:
        random = np.random.default_rng(group)
        prompt = random.integers(0, self.spec.vocab_size, 8 + 4 * group).tolist()
        seed, name = 1000 * group + index, f"{group}.{index}"
        draft = Draft(
            prompt, id=name, rollout_id=name, group_id=str(group), index=index, seed=seed, sampling=dict(SAMPLING)
        )
        draft.add_sampled(await client.generate(GenerationRequest(prompt, SAMPLING, seed, routed_experts=True)))
        rollout = draft.finish()
        rollout.reward = float((rollout.sampled_ids() % 2 == 0).mean())
        return rollout

    def batches(self, sampled: Sampled) -> list[Any]:
        """Returns the micro-batches of one update with the rollouts."""

        def advantages(groups: Sequence[Group]) -> list[Any]:
            return [value for group in groups for value in group_advantages(self.config.algorithm, group)]

        (rows,) = make_update_rows(self.config, sampled.groups, advantages)
        return make_packer(self.config, self.spec, self.sizes)(rows).shards[0]

    async def stop(self) -> None:
        """Stops trainer and engine."""
        await self.stop_engine()
        self.trainer.stop()
