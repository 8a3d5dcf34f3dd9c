"""The sides of benchmarks/rollout_scale.py, each of which returns the rollouts of one step after the other.

slimx   RolloutManager and rollout workers, with the records of a run: saved rollouts, metrics, samples, live table
driver  the same without workers: the driver generates all rollouts (rollout.workers 1)
plain   what a user would write: Ray actors with aiohttp, a task in the driver for each group in flight, and the
        columns of all rollouts returned to the driver as NumPy arrays"""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import ray
import waiting_sides
from rich.console import Console
from rollout_buffer import InOrder
from rollout_scale_engine import TOP_K
from rollout_scale_job import MARKER, Job, plain_rollout
from transformers import PreTrainedTokenizerBase

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.sections.policies import ACTOR
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.records import Prompt
from slimx.data.saved.step_files import DIRECTORY, StepFiles, origin_of
from slimx.engines.outage import Outage
from slimx.extras.rollout_workers.pool import WorkerPool
from slimx.observability.events import Events
from slimx.observability.live.table import LiveTable
from slimx.orchestration.state.recording import Records
from slimx.orchestration.step.measure import group_metrics
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.generation import Endpoint
from slimx.rollout.flow.manager import RolloutManager
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.hook_loading import load_hooks
from slimx.rollout.policy import PolicyClient

ROOT = Path(__file__).parents[1]
GROUP = 8
"""Rollouts of a group."""
CALLS = 1_000_000
"""Concurrent calls of an actor of the plain side: no limit."""
VOCABULARY = 2000
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2**20,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
"""config.json of the model that the workers read. It has no weights."""


async def nothing() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of one measurement, which all sides follow."""

    job: Job
    url: str
    """URL of the engines."""
    waiting: int
    """Rollouts in flight."""
    per_step: int
    """Groups of a step."""
    workers: int
    requests: int
    """Concurrent requests of all workers."""
    directory: Path
    """Directory of the model's tokenizer and of the run."""


def make_config(setting: Setting) -> Config:
    """Returns the run's configuration, and writes the model's files."""
    waiting_sides.tokenizer().save_pretrained(setting.directory)
    (setting.directory / "config.json").write_text(json.dumps(MODEL))
    settings = {
        "prompts_per_step": setting.per_step,
        "group_size": GROUP,
        "max_rollouts": setting.waiting,
        "concurrency": setting.requests,
        "rollout_deadline": 86400,
        "max_prompt_tokens": setting.job.prompt_tokens,
        "generate": "rollout_scale_job.generate",
        "options": json.dumps(setting.job.options),
        "sampling.max_new_tokens": setting.job.answer,
        "over_sampling": setting.waiting / GROUP / setting.per_step,
        "workers": setting.workers,
    }
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            f"run.dir={setting.directory / 'run'}",
            f"model.path={setting.directory}",
            f"schedule.max_staleness={max(1, -(-setting.waiting // (GROUP * setting.per_step)))}",
            f"track.rollouts={{every: 1, routes: {str(setting.job.layers > 0).lower()}}}",
            "trainer={world_size: 1, expert: 1}",
            "reward.parts=[{name: length, function: rollout_scale_job.length_reward}, "
            "{name: even, function: rollout_scale_job.even_reward}]",
            *(f"rollout.{key}={value}" for key, value in settings.items()),
        ],
    )


class DriverSide:
    """slimx's rollouts, generated in this process."""

    workers = "none"
    """Name of the class of Ray's actors, by which their processes are found."""

    def __init__(self, setting: Setting):
        self.config = make_config(setting)
        self.setting = setting
        self.step = 0
        self.stack = AsyncExitStack()

    async def maker(self, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase) -> GroupMaker:
        """Returns what generates the groups; `stack` closes it."""
        client = endpoint.client(self.config.rollout, nothing, Outage())
        await self.stack.enter_async_context(client)
        policy = PolicyClient(client, tokenizer, VOCABULARY)
        return GroupMaker(self.config, load_hooks(self.config), {ACTOR: policy})

    async def __aenter__(self) -> DriverSide:
        config, job = self.config, self.setting.job
        directory = Path(config.run.dir)
        directory.mkdir(exist_ok=True)
        tokenizer = load_tokenizer(config.model.path)
        shape = ModelShape(vocab_size=VOCABULARY)
        if job.layers:
            shape = ModelShape(vocab_size=VOCABULARY, layers=job.layers, top_k=TOP_K, experts=128)
        endpoint = Endpoint(url=self.setting.url, shape=shape, api_key=None, adapters=None, images="")
        maker = await self.maker(endpoint, tokenizer)
        messages = [{"role": "user", "content": "q" * (job.prompt_tokens - MARKER)}]
        prompts = [Prompt(id=f"p{number}", messages=messages) for number in range(10_000)]
        self.manager = RolloutManager(config, InOrder(prompts, 1), maker)
        self.stack.push_async_callback(self.manager.stop)
        table = LiveTable(10_000, 0, Console(file=io.StringIO()))
        self.records = Records(config, table, {ACTOR: tokenizer}, Events())
        self.stack.callback(self.records.close)
        origin = origin_of(config, tokenizer)
        self.records.rollouts = StepFiles(directory / DIRECTORY, origin, every=1, keep=2, resume_step=0)
        return self

    async def next_step(self) -> int:
        """Takes the next step's rollouts and records them as the loop does. Returns their number."""
        self.step += 1
        batch = await self.manager.next_batch()
        self.records.keep(self.step, 0, batch, self.manager.maker)
        metrics = group_metrics(batch, self.config.eval.passing)
        await self.records.kept()
        self.records.step(self.step, 0, metrics, batch.groups, 1.0)
        return sum(len(group.trajectories) for group in batch.groups)

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()


class SlimxSide(DriverSide):
    """slimx's rollouts, generated by rollout workers."""

    workers = "RolloutWorker"

    async def maker(self, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase) -> GroupMaker:
        pool = WorkerPool(self.config, load_hooks(self.config), {ACTOR: PolicyClient(None, tokenizer, VOCABULARY)})
        logs = Path(self.config.run.dir) / "logs"
        logs.mkdir()
        started = pool.started(self.setting.workers, {ACTOR: endpoint}, {}, 2**20, logs, note=print, record=print)
        await self.stack.enter_async_context(started)
        return pool


@ray.remote(num_cpus=0, max_restarts=0)
class PlainWorker:
    """An actor that makes rollouts with aiohttp."""

    def __init__(self, url: str, job: Job, requests: int, result: list[int]):
        self._url, self._job, self._result = url, job, result
        self._requests = requests
        self._session: aiohttp.ClientSession | None = None

    async def ready(self) -> None:
        """Opens the HTTP client."""
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        self._places = asyncio.Semaphore(self._requests)

    async def group(self, prompt: list[int], number: int) -> list[dict[str, Any]]:
        """Returns the rollouts of a group."""
        assert self._session is not None
        return await asyncio.gather(
            *(
                plain_rollout(
                    self._session,
                    self._places,
                    self._url,
                    self._job,
                    prompt,
                    self._result,
                    index,
                    GROUP * number + index,
                )
                for index in range(GROUP)
            )
        )


class PlainSide:
    """A pool of Ray actors with aiohttp."""

    workers = "PlainWorker"

    def __init__(self, setting: Setting):
        self.setting = setting
        of = waiting_sides.tokenizer()
        self._prompt = of("q" * setting.job.prompt_tokens, add_special_tokens=False).input_ids
        self._result = of("r" * setting.job.result, add_special_tokens=False).input_ids
        self._done: asyncio.Queue[asyncio.Future[list[dict[str, Any]]]] = asyncio.Queue()
        self._number = 0
        self._tasks: set[asyncio.Future[list[dict[str, Any]]]] = set()
        self._actors: list[Any] = []

    async def __aenter__(self) -> PlainSide:
        setting = self.setting
        actor = PlainWorker.options(max_concurrency=CALLS)
        share = max(1, setting.requests // setting.workers)
        self._actors = [actor.remote(setting.url, setting.job, share, self._result) for _ in range(setting.workers)]
        await asyncio.gather(*(one.ready.remote() for one in self._actors))
        for _ in range(setting.waiting // GROUP):
            self._start()
        return self

    def _start(self) -> None:
        actor = self._actors[self._number % len(self._actors)]
        task = asyncio.ensure_future(actor.group.remote(self._prompt, self._number))
        self._number += 1
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[list[dict[str, Any]]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._done.put_nowait(task)

    async def next_step(self) -> int:
        """Waits for the next step's groups, in the order in which they end, and starts as many. Returns the number of
        rollouts."""
        groups = []
        for _ in range(self.setting.per_step):
            groups.append((await self._done.get()).result())
            self._start()
        return sum(len(group) for group in groups)

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for actor in self._actors:
            ray.kill(actor)


SIDES = {"slimx": SlimxSide, "driver": DriverSide, "plain": PlainSide}
