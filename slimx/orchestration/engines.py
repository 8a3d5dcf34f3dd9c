"""All engines of a run behind their router: created, started, put to sleep and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import ray

from slimx.config.engines import Engines
from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.orchestration.cluster import ENGINE_SHARE
from slimx.orchestration.engine_actor import EngineActor, EngineHandle
from slimx.orchestration.recovery import Membership
from slimx.ports import free_port
from slimx.preflight.publication import engine_sizes
from slimx.rollout.router import Router


class EngineGroup:
    """The engines, the router in front of them, and who of them takes part (`members`)."""

    def __init__(
        self,
        config: Config,
        device: str,
        log_dir: Path,
        *,
        moe: bool,
        note: Callable[[str], None] = lambda text: None,
    ):
        """`note` is told in one line of every engine that is lost or started again."""
        self.config = config
        self.engines = [
            self._create(group, number, device, log_dir, moe)
            for group in config.rollout.engines
            for number in range(group.count)
        ]
        self.router = Router(
            free_port(), free_port(), log_dir / "router.log", request_deadline_s=config.rollout.request_deadline
        )
        self.members = Membership(
            self.engines,
            self.router,
            health=config.rollout.health,
            start_deadline_s=config.cluster.start_deadline,
            note=note,
        )

    def _create(self, group: Engines, number: int, device: str, log_dir: Path, moe: bool) -> EngineHandle:
        config, name = self.config, f"{group.name}-{number}"
        values = {
            "name": name,
            "model_path": group.model or config.model.path,
            "sizes": engine_sizes(group),
            "dtype": config.numerics.dtype,
            "device": device,
            "threads": group.threads,
            "max_total_tokens": group.max_total_tokens,
            "seed": config.run.seed,
            "routed_experts": moe and config.rollout.routed_experts,
            "sglang": group.sglang,
        }
        share = ENGINE_SHARE if config.schedule.colocate else group.ranks
        actor = ray.remote(EngineActor).options(
            num_cpus=group.threads * group.ranks, num_gpus=share if device == "cuda" else 0
        )
        log, deadline = log_dir / f"engine-{name}.log", config.publish.step_deadline
        return EngineHandle(name, partial(actor.remote, values, str(log), deadline), log, deadline)

    async def start(self) -> None:
        """Start servers and router together. An engine is in the router only after its first publication."""
        limit = self.config.cluster.start_deadline
        self.router.start()
        await asyncio.gather(self.router.wait_ready(limit), *(engine.start(limit) for engine in self.engines))

    async def sleep(self) -> None:
        """Release the engines' KV cache. One that cannot is quarantined."""
        await asyncio.gather(*(self._or_quarantine(engine, engine.sleep()) for engine in self.members.candidates()))

    async def wake(self, *, serve: bool = False) -> None:
        """Take it back; `serve`: generate at once, where no publication follows."""
        engines = self.members.candidates()
        await asyncio.gather(*(self._or_quarantine(engine, engine.wake(serve=serve)) for engine in engines))

    async def _or_quarantine(self, engine: EngineHandle, work: Awaitable[None]) -> None:
        try:
            await work
        except SlimxError as error:
            await self.members.quarantine(engine, error)

    async def stop(self) -> None:
        """End router and servers, each with its whole tree; the first problem is raised after all have been tried."""
        await self.members.stop()
        results = await asyncio.gather(
            self.router.stop(), *(engine.stop() for engine in self.engines), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                raise result
