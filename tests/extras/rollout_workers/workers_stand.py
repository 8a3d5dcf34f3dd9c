"""A run's rollouts on workers of a real Ray cluster, with an HTTP engine in this process that samples by seed and
position alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from slimx.cluster.restarts import Restart
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.prompts.read import PromptSource
from slimx.data.records import Group, Prompt
from slimx.engines.outage import Outage
from slimx.extras.rollout_workers.pool import WorkerPool
from slimx.models.families import read_model
from slimx.rollout.client.generation import Endpoint, ModelShape
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.flow.tickets import Batch, Dropped
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.policy import PolicyClient
from tests.unit.rollout.flow_stand import token_of

ROOT = Path(__file__).parents[3]
TOKENS = 4
"""Number of tokens of an answer."""
STEP_SIZE, GROUP_SIZE = 8, 4


class Engine:
    """A server of /generate. A request takes `seconds` and returns `TOKENS` tokens, or those until it is aborted."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.version = 0
        self.sampled: Counter[tuple[int, int]] = Counter()
        """Number of times that the token of a seed at a position was sampled."""
        self.failing = 0
        """Number of further requests that fail."""
        self.url = ""
        self._aborts = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.failing:
            self.failing -= 1
            return web.json_response({"error": "lost"}, status=500)
        parameters, prompt = body["sampling_params"], len(body["input_ids"])
        seed, entries, reason = parameters["sampling_seed"], [], "stop"
        count = min(TOKENS, parameters["max_new_tokens"])
        aborts = self._aborts
        for position in range(prompt, prompt + count):
            try:
                async with asyncio.timeout(self.seconds / TOKENS):
                    await aborts.wait()
                reason = "abort"
                break
            except TimeoutError:
                self.sampled[seed, position] += 1
                entries.append([-1.0, token_of(seed, position), None])
        meta = {
            "output_token_logprobs": entries,
            "completion_tokens": len(entries),
            "finish_reason": {"type": reason},
            "weight_version": str(self.version),
            "prompt_tokens": prompt,
        }
        return web.json_response({"text": "", "meta_info": meta})

    async def abort(self) -> None:
        self._aborts.set()
        self._aborts = asyncio.Event()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


def make_config(directory: Path, model: Path, *overrides: str, strike: str = "", pause: float = 0.0) -> Config:
    """Returns a run of 8 groups of 4 a step whose hooks are those of worker_hooks.py."""
    options = f"rollout.options={{marks: {directory}, strike: {strike!r}, pause: {pause}}}"
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            f"run.dir={directory}",
            f"model.path={model}",
            f"rollout.prompts_per_step={STEP_SIZE}",
            f"rollout.group_size={GROUP_SIZE}",
            "rollout.routed_experts=false",
            "rollout.generate=tests.extras.rollout_workers.worker_hooks.two_turns",
            "reward.function=tests.extras.rollout_workers.worker_hooks.reward",
            "rollout.filter=tests.extras.rollout_workers.worker_hooks.keep",
            options,
            *overrides,
        ],
    )


def prompts() -> list[Prompt]:
    return [Prompt(id=f"p{n}", token_ids=[4 + n, 5, 6]) for n in range(64)]


class Rollouts:
    """The rollouts of a run, between its start and its end."""

    def __init__(self, config: Config, engine: Engine):
        self.config = config
        self.engine = engine
        self.outage = Outage()
        self.looks = 0
        self.dropped: list[Dropped] = []
        self.restarts: list[Restart] = []
        self.notes: list[str] = []
        self.pool: WorkerPool | None = None
        self.manager: RolloutManager

    @asynccontextmanager
    async def started(self, workers: int) -> AsyncIterator[Rollouts]:
        """Starts `workers` workers; without any, generates in this process."""
        config, engine = self.config, self.engine
        shape = ModelShape.of(read_model(config.model.path))
        endpoint = Endpoint(url=engine.url, shape=shape, api_key=None, adapters=None, images="")
        async with AsyncExitStack() as stack:
            client = endpoint.client(config.rollout, self._look, self.outage)
            await stack.enter_async_context(client)
            policy = PolicyClient(client, load_tokenizer(config.model.path), shape.vocab_size)
            kind: type[GroupMaker] = WorkerPool if workers else GroupMaker
            maker = kind(config, load_hooks(config), {"actor": policy}, outage=self.outage)
            if isinstance(maker, WorkerPool):
                self.pool = maker
                logs = Path(config.run.dir, "logs")
                logs.mkdir(parents=True, exist_ok=True)
                members: Any = SimpleNamespace(members=SimpleNamespace(outage=self.outage, look=self._look))
                await stack.enter_async_context(
                    maker.started(
                        workers,
                        {"actor": endpoint},
                        {"actor": members},
                        256,
                        logs,
                        note=self.notes.append,
                        record=self.restarts.append,
                    )
                )
            source = PromptSource(prompts(), 1)
            self.manager = RolloutManager(config, source, maker, self.dropped.append, engine.abort)
            stack.push_async_callback(self.manager.stop)
            yield self

    async def _look(self) -> None:
        self.looks += 1

    async def publish(self, version: int) -> None:
        await self.manager.maker.begin("actor", version)
        self.engine.version = version
        self.manager.maker.versions["actor"] = version

    async def batches(self, steps: int) -> list[Batch]:
        """Returns the batches of `steps` steps, with a publication after each."""
        out = []
        for _ in range(steps):
            out.append(await self.manager.next_batch())
            await self.publish(self.manager.maker.version + 1)
        return out


def content(batches: Sequence[Batch]) -> list[Any]:
    """Returns all that a batch's groups must have in common wherever they were generated."""
    return [shown(group) for batch in batches for group in batch.groups]


def shown(group: Group) -> Any:
    trajectories = [
        (t.id, t.token_ids.tolist(), t.loss_mask.tolist(), t.reward, t.status, t.sampling) for t in group.trajectories
    ]
    return group.id, group.prompt.id, trajectories
