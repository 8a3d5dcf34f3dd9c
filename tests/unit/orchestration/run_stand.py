"""A run whose trainers, engines and publisher are in this process and write down when their turn is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainBatch
from slimx.data.records import Prompt
from slimx.engines.outage import EnginePhase, Outage
from slimx.errors import SlimxError
from slimx.layout.ranks import Sizes
from slimx.observability.events import Events
from slimx.observability.live.table import LiveTable
from slimx.orchestration.engines.service import EngineService
from slimx.orchestration.recovery import RankLossHandler
from slimx.orchestration.run import Run
from slimx.orchestration.start.prepare import ServedPolicy, Sources
from slimx.orchestration.state.recording import Records
from slimx.orchestration.state.saves import Saves
from slimx.reshard.parties import NoReceiverLeft
from slimx.rollout import single_turn
from slimx.rollout.hook_loading import Hooks
from slimx.rollout.hooks import Generate, Keep
from slimx.trainer.checkpoint import files
from slimx.trainer.checkpoint.files import Report
from tests.unit.rollout.rollout_stand import FakeEngine, config_of, one, prompts, the_tokenizer

SIZES = Sizes()
WAKE = "engines wake"
LIMIT_S = 300.0
"""For what would never end."""


@dataclass
class Parts:
    """Trainers, engines and the publisher between them: each notes when its turn is."""

    done: list[str] = field(default_factory=list)
    client: FakeEngine = field(default_factory=FakeEngine)
    actors: tuple[None, ...] = (None,)
    config: Config | None = None
    sizes: Sizes = SIZES
    name: str = "trainer-judge"
    marks: list[str] = field(default_factory=list)
    """Marks of the logs."""
    plans: frozenset[str] = frozenset({"publish"})
    rows: list[list[list[int]]] = field(default_factory=list)
    """By step the tokens of the rows that were trained."""
    lost: int = 0
    """Publications in which every engine is lost."""
    vacate: Callable[[], Awaitable[None]] | None = None
    """Frees the devices before engines take the rest of their memory."""

    async def train_step(self, updates: list[TrainBatch], *, step: int, version: int) -> dict[str, float]:
        batches = [batch for update in updates for shard in update.shards for batch in shard]
        self.rows.append([part.tolist() for batch in batches for part in np.split(batch.tokens, _ends(batch))])
        self.done.append(f"train {step} at version {version}")
        return {"gap/tokens": 1.0, "gap/max": 0.0}

    async def save(self, path: Path, *, step: int) -> None:
        self.done.append(f"save {step}")
        files.write_report(path, 0, Report({}, []))

    async def restore(self, path: Path, *, same_layout: bool, load_optimizer: bool) -> None:
        self.done.append(f"restore {path.name}")

    async def check_files(self, path: Path, shares: list[bytes]) -> None:
        for share in shares:
            files.check_digests(path, files.decode_records(share))

    async def memory(self) -> dict[str, float]:
        return {}

    def mark(self, text: str) -> None:
        self.marks.append(text)

    def late(self) -> None:
        """Does nothing: no part is asked for anything."""

    async def reload(self) -> None:
        self.done.append("reload trainers")

    async def offload(self, *, weights: bool = True) -> None:
        self.done.append("offload trainers" if weights else "offload optimizer")

    async def sleep(self) -> None:
        self.done.append("engines sleep")

    async def wake(self) -> None:
        self.done.append("engines wake")

    async def interrupt(self) -> None:
        """Does nothing: nothing is in flight between two steps."""

    async def publish(self, version: int, *, trainer_step: int) -> SimpleNamespace:
        if self.lost:
            self.lost -= 1
            raise NoReceiverLeft("every engine was lost")
        self.done.append(f"publish {version}")
        self.client.version = version
        manifest = SimpleNamespace(version=version)
        if self.vacate is not None:
            await self.vacate()
        seconds = {"commit": 0.5}
        counts = {"tensors": 3, "nbytes": 2**20, "wire": None}
        return SimpleNamespace(manifest=manifest, seconds=seconds, engines={"e": 1}, lost=(), **counts)


def _ends(batch: MicroBatch) -> list[int]:
    return np.cumsum(batch.lengths)[: len(batch.rows)].tolist()[:-1]


class Members:
    """Engines that all serve, until they are `broken`."""

    def __init__(self) -> None:
        self.outage, self.keeper, self.engine_phase = Outage(), SimpleNamespace(in_flight=None), EnginePhase()
        self.run, self.broken = True, asyncio.Event()

    async def available(self) -> None:
        """Returns at once."""

    async def failed(self) -> None:
        await self.broken.wait()
        raise SlimxError("no engine is left", code="engines.none", about="policy")

    starved = failed

    def metrics(self) -> dict[str, float]:
        return {"engines/serving": 1.0}

    def awaited(self) -> None:
        """Waits for nothing."""


def sources_of(
    config: Config, generate: Generate = single_turn.generate, keep: Keep | None = None, **eval_prompts: list[Prompt]
) -> Sources[ServedPolicy]:
    """Returns the inputs of rollouts that are all rewarded with 1."""
    policies = {
        name: ServedPolicy(config=policy, spec=SimpleNamespace(vocab_size=None), tokenizer=the_tokenizer())
        for name, policy in config.by_policy.items()
    }
    hooks = Hooks(generate, one, keep)
    return Sources(policies=policies, hooks=hooks, by_source={"": prompts()}, eval_prompts=eval_prompts)


def service_of(config: Config, sources: Sources[ServedPolicy], parts: dict[str, Parts]) -> EngineService:
    """Returns started engines without servers: the clients of `parts` answer by themselves."""
    service = EngineService(config, sources, Path(config.run.dir), note=lambda line: None)
    for name, part in parts.items():
        service.clients[name] = part.client
        service.groups[name] = SimpleNamespace(
            members=Members(), engines=[], interrupt=part.interrupt, sleep=part.sleep, wake=part.wake
        )
    return service


def run_of(
    directory: Path,
    parts: Parts,
    leaving: asyncio.Event | None = None,
    *,
    further: dict[str, Parts] | None = None,
    generate: Generate = single_turn.generate,
    **keys: Any,
) -> Run:
    """Returns a run. `further`: parts of policies besides the run's own."""
    keys = {
        "trainer__balance": "tokens",
        "track__tensorboard": False,
        "checkpoint__export_hf": False,
        "publish__transport": "memory",
    } | keys
    config = config_of(algorithm__reference=False, **keys)
    run = config.run.model_copy(update={"dir": str(directory)})
    model = directory / "model"
    if not model.exists():
        the_tokenizer().save_pretrained(model)
        (model / "config.json").write_text(json.dumps({"vocab_size": 100}))
    config = config.model_copy(update={"run": run, "model": config.model.model_copy(update={"path": str(model)})})
    by_policy = {"actor": parts, **(further or {})}
    service = service_of(config, sources_of(config, generate), by_policy)
    policies = {}
    for name, policy in config.by_policy.items():
        policies[name] = SimpleNamespace(config=policy, spec=None, sizes=SIZES, encoding="hf")
        by_policy[name].config = policy
    prepared = SimpleNamespace(by_source=service.sources.by_source, eval_prompts={}, critic=None, policies=policies)
    tokenizers = dict.fromkeys(policies, the_tokenizer())
    records = Records(config, LiveTable(config.schedule.steps, 0, Console(quiet=True)), tokenizers, Events())
    saves = Saves(directory / "checkpoints", keep=2)
    return Run(service, prepared, by_policy, records, saves, RankLossHandler(parts), leaving=leaving)


async def stopped(run: Run) -> None:
    await run.checkpoints.stop()
    await run.rollouts.stop()
    run.records.close()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open()]
