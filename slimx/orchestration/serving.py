"""Engines without trainers: what `slimx generate` and `slimx eval` start.

The servers keep the weights that they start with, and call them version 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup, tell_restarts
from slimx.engines.fleet.handle import EngineHandle
from slimx.engines.fleet.roster import Roster
from slimx.engines.server.control import EngineControl
from slimx.errors import SlimxError
from slimx.layout.ranks import sizes_of
from slimx.models.families import ModelSpec
from slimx.models.files.megatron_directory import is_megatron
from slimx.orchestration.batches import longest_trajectory
from slimx.orchestration.frozen import FrozenEngines, admit_joining, keep_admitting
from slimx.orchestration.lifetime.heap import settled_heap
from slimx.orchestration.lifetime.lifetime import stopping, together
from slimx.orchestration.prepare import Sources
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.flow.rollouts import GroupMaker
from slimx.rollout.proxy.server import ChatProxy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Serving:
    """Started engines, and what makes groups with them."""

    engines: EngineGroup
    make_maker: Callable[[], GroupMaker]
    """Whoever asks for one closes it."""

    async def watched(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises SlimxError when no engine is left that could come back."""
        task = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self.engines.members.failed())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and not (task.done() and task.exception() is None):
                lost.result()
            return await task
        finally:
            for future in (task, lost):
                future.cancel()
            await asyncio.gather(task, lost, return_exceptions=True)


def without_trainers(config: Config, checkpoint: Path | None) -> Config:
    """`config` with engines that start from `checkpoint`, a Hugging Face directory, or from the weights that training
    would start from. Raises SlimxError for weights that engines cannot load."""
    if not config.rollout.policy_engines:
        raise SlimxError(
            "there is no engine to generate with: "
            + ("rollout.replay is set; leave it out" if config.rollout.replay else "rollout.engines is empty; add one")
        )
    given = checkpoint or (Path(config.trainer.load) if config.trainer.load else None)
    if given is not None:
        name = "--checkpoint" if checkpoint else "trainer.load"
        if is_megatron(given):
            raise SlimxError(
                f"{name}: {given} is Megatron-LM's, and engines load Hugging Face directories; convert it (slimx "
                "convert megatron-to-hf), or export one while training (checkpoint.export_every)"
            )
        if not (given / "config.json").is_file():
            raise SlimxError(f"{name}: {given} holds no config.json; name a Hugging Face directory with weights")
    groups = []
    for group in config.rollout.engines:
        if not group.frozen and group.urls:
            raise SlimxError(
                f"rollout.engines group {group.name} has urls: nobody knows what weights those servers hold; let slimx "
                "start the engines (count)"
            )
        if given is not None and not group.frozen and (checkpoint is not None or group.model is None):
            # An export may come without its tokenizer.
            sglang = {"tokenizer_path": config.model.path} | group.sglang
            group = group.model_copy(update={"model": str(given), "sglang": sglang})
        groups.append(group)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"engines": tuple(groups)}),
            "schedule": config.schedule.model_copy(update={"colocate": False}),  # there is nobody to take turns with
        }
    )


@asynccontextmanager
async def serving(
    config: Config, sources: Sources, spec: ModelSpec, device: str, directory: Path, note: Callable[[str], None]
) -> AsyncIterator[Serving]:
    """Start all engines of `config` (see `without_trainers`) and end them afterwards. Ray is there already.

    `directory`: gets `logs/` and `engines.json`. `note` is told in one line what happens to engines."""
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        frozen = FrozenEngines(config, device, logs, note=note)
        stack.push_async_exit(stopping(frozen.stop, note))
        engines = EngineGroup(config, device, logs, moe=spec.experts > 0, note=note)
        stack.push_async_exit(stopping(engines.stop, note))
        await together([frozen.start(), engines.start()])
        await frozen.check_teacher(sources.tokenizer)
        groups = [engines, *frozen.groups.values()]
        stack.callback(tell_restarts, groups, note)
        Roster(directory / "engines.json").add(groups)
        await admit_joining(engines, _call_version_0)
        engines.members.watch()
        readmitting = asyncio.create_task(keep_admitting(engines, _call_version_0))
        stack.push_async_callback(_ended, readmitting)
        client = GenerationClient(
            engines.router.url,
            ModelShape.of(spec),
            config.rollout.request_deadline,
            retry_s=config.rollout.request_deadline,
            retries=config.rollout.request_retries,
            on_lost=engines.members.look,
            outage=engines.members.outage,
            api_key=engines.keys.api_key,
        )
        await stack.enter_async_context(client)
        engines.members.probe = prober(client.shape, config)
        # As long as what training on the same configuration could take.
        context = longest_trajectory(config, spec, sizes_of(config.trainer))
        proxy = ChatProxy(config.rollout.proxy.host, config.rollout.proxy.port, context=context)
        stack.push_async_callback(proxy.stop)
        stack.enter_context(settled_heap())
        yield Serving(
            engines,
            partial(
                GroupMaker,
                config,
                sources.hooks,
                sources.tokenizer,
                client,
                frozen.clients,
                proxy,
                engines.members.outage,
            ),
        )


async def _call_version_0(engine: EngineHandle) -> None:
    """Stamp what the server started with: tokens without a version are refused."""
    await EngineControl(engine.url, engine.name, engine.keys).set_version(0)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def prober(shape: ModelShape, config: Config) -> Callable[[EngineHandle], Awaitable[None]]:
    """A probe that asks one engine itself, past the router, once for a token, with all that rollouts ask for."""
    rollout = config.rollout

    async def probe(engine: EngineHandle) -> None:
        asked = GenerationClient(
            engine.url, shape, rollout.health.timeout, retry_s=0, retries=0, api_key=engine.keys.api_key
        )
        async with asked as client:
            await client.generate([0], {"max_new_tokens": 1}, 0, rollout.routed_experts)

    return probe
