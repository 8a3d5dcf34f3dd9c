"""All engines behind their router: one Ray actor per server, its state, its health, and its side of a publication."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.orchestration.waiting import gather
from slimx.ports import free_port
from slimx.reshard.packed import PackedBucket
from slimx.rollout.engine import Engine, EngineSpec, State
from slimx.rollout.router import Router


class EngineActor:
    """The process that owns one server: on the server's own node, so that it can start, watch and end it."""

    def __init__(self, values: dict[str, Any], log_path: str):
        self.engine = Engine(EngineSpec(port=free_port(), **values), log_path)

    async def start(self, deadline_s: float) -> dict[str, Any]:
        """Start the server and wait until it attests the plugin; its URL and attestation."""
        self.engine.start()
        await self.engine.wait_ready(deadline_s)
        return {"url": self.engine.spec.url, "attestation": self.engine.attestation}

    async def call(self, method: str, *arguments: Any) -> Any:
        """One of Engine's own methods."""
        return await getattr(self.engine, method)(*arguments)

    async def inventory(self) -> dict[str, str]:
        return await self.engine.control.inventory()

    async def state(self) -> str:
        return str(self.engine.state)

    async def stop(self) -> None:
        await self.engine.stop()


class EngineHandle:
    """One engine as the loop and the publisher see it."""

    def __init__(self, name: str, actor: Any, log: Path, deadline_s: float):
        self.name, self.actor, self.log, self.deadline_s = name, actor, log, deadline_s
        self.url = ""
        self.lost: SlimxError | None = None
        """Why the engine is DEAD, once it is."""

    async def start(self, deadline_s: float) -> dict[str, Any]:
        out = await self._call("the start", self.actor.start.remote(deadline_s), deadline_s + 30)
        self.url = out["url"]
        return out

    async def stage(self, packed: PackedBucket, bucket: int) -> None:
        await self._engine("stage", packed.path, list(packed.tensors), bucket, packed.size)

    async def inventory(self) -> dict[str, str]:
        return await self._call("the inventory", self.actor.inventory.remote(), self.deadline_s)

    async def verify(self) -> int:
        """Number of tensors that the engine proved to hold as published."""
        return (await self._engine("verify"))["checked"]

    async def pause(self) -> None:
        if await self.state() is State.READY:
            await self._engine("pause")

    async def load(self) -> None:
        await self._engine("load")

    async def commit(self, version: int) -> None:
        await self._engine("commit", version)

    async def resume(self) -> None:
        await self._engine("resume")

    async def abort(self) -> None:
        await self._engine("abort")

    async def sleep(self) -> None:
        """Release the memory of the KV cache (nothing on the CPU)."""
        await self.pause()
        await self._engine("sleep", ("kv_cache",))

    async def wake(self) -> None:
        await self._engine("wake")

    async def state(self) -> State:
        return State(await self._call("its state", self.actor.state.remote(), self.deadline_s))

    async def check_health(self, deadline_s: float) -> None:
        await self._call("the health check", self.actor.call.remote("check_health", deadline_s), deadline_s + 5)

    async def stop(self) -> None:
        await self._call("the stop", self.actor.stop.remote(), 30)

    async def _engine(self, method: str, *arguments: Any) -> Any:
        return await self._call(method, self.actor.call.remote(method, *arguments), self.deadline_s)

    async def _call(self, what: str, reference: Any, deadline_s: float) -> Any:
        (out,) = await gather(
            [reference],
            what=f"{what} of engine {self.name}",
            holders=[f"engine {self.name}"],
            deadline_s=deadline_s,
            logs=[self.log],
        )
        return out


class EngineGroup:
    """All engines of the run and the router in front of them."""

    def __init__(self, config: Config, device: str, log_dir: Path, *, moe: bool):
        self.config = config
        self.engines = [
            self._create(group, number, device, log_dir, moe)
            for group in config.rollout.engines
            for number in range(group.count)
        ]
        self.router = Router(
            free_port(), free_port(), log_dir / "router.log", request_deadline_s=config.rollout.request_deadline
        )
        self._watchers: list[asyncio.Task[None]] = []

    def _create(self, group: Any, number: int, device: str, log_dir: Path, moe: bool) -> EngineHandle:
        config, name = self.config, f"{group.name}-{number}"
        values = {
            "name": name,
            "model_path": config.model.path,
            "dtype": config.numerics.dtype,
            "device": device,
            "threads": group.threads,
            "max_total_tokens": group.max_total_tokens,
            "seed": config.run.seed,
            "routed_experts": moe and config.rollout.routed_experts,
            "sglang": group.sglang,
        }
        share = 0.5 if config.schedule.colocate else 1
        actor = ray.remote(EngineActor).options(num_cpus=group.threads, num_gpus=share if device == "cuda" else 0)
        log = log_dir / f"engine-{name}.log"
        return EngineHandle(name, actor.remote(values, str(log)), log, config.publish.deadline)

    async def start(self) -> list[dict[str, Any]]:
        """Start servers and router together; registered and healthy in the router when it returns."""
        limit = self.config.cluster.start_deadline
        self.router.start()
        started = await asyncio.gather(self.router.wait_ready(limit), *(engine.start(limit) for engine in self.engines))
        await asyncio.gather(*(self.router.add(engine.url) for engine in self.engines))
        return started[1:]

    def watch(self, on_loss: Any) -> None:
        """Check every engine's health from now on; `on_loss(error)` is called once for an engine that is lost."""
        self._watchers = [asyncio.create_task(self._watch(engine, on_loss)) for engine in self.engines]

    async def sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self.engines))

    async def wake(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self.engines))

    async def stop(self) -> None:
        """End router and servers, each with its whole tree; the first problem is raised after all have been tried."""
        for watcher in self._watchers:
            watcher.cancel()
        results = await asyncio.gather(
            self.router.stop(), *(engine.stop() for engine in self.engines), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch(self, engine: EngineHandle, on_loss: Any) -> None:
        health, failures = self.config.rollout.health, 0
        while True:
            await asyncio.sleep(health.interval)
            try:
                await engine.check_health(health.timeout)
                failures = 0
            except SlimxError as error:
                failures += 1
                ended = "ended with status" in str(error) or "died during" in str(error)
                if ended or failures >= health.threshold:
                    engine.lost = error
                    on_loss(error)
                    return
