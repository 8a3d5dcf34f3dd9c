"""The real router is killed and stopped under requests: it is started again, and every request is answered."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp.web
import psutil
import pytest

from slimx.config.sections.engines import Health
from slimx.engines.fleet.membership import Membership
from slimx.engines.server.router import Router
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.runtime.ports import free_port
from tests.unit.engines.recovery_stand import FakeEngine

META = {
    "output_token_logprobs": [[-1.5, 4, None]],
    "finish_reason": {"type": "stop"},
    "weight_version": "6",
    "cached_tokens": 0,
}


class Server:
    """An engine as the router and the client see it. Requests are held while `open` is not set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.requests = 0
        self.runner: aiohttp.web.AppRunner

    async def generate(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        self.requests += 1
        await self.open.wait()
        return aiohttp.web.json_response({"meta_info": META})

    async def describe(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"model_path": "none", "served_model_name": "none"})

    async def start(self) -> str:
        app = aiohttp.web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/{path:.*}", self.describe)
        self.runner = aiohttp.web.AppRunner(app, shutdown_timeout=1)
        await self.runner.setup()
        await aiohttp.web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"


class Stand:
    def __init__(self, router: Router, servers: list[Server], members: Membership, client: GenerationClient):
        self.router, self.servers, self.members, self.client = router, servers, members, client

    @property
    def process(self) -> psutil.Process:
        """The router's own process, below its guard."""
        return psutil.Process(self.router.process.pid).children()[0]


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Stand]:
    """Runs two engines behind a real router, watched every 0.2 s."""
    async with AsyncExitStack() as stack:
        servers, engines = [Server(), Server()], []
        for number, server in enumerate(servers):
            engine = FakeEngine(f"e{number}", [], [])
            engine.url = await server.start()
            stack.push_async_callback(server.runner.cleanup)
            engines.append(engine)
        router = Router(free_port(), free_port(), directory / "router.log")
        health = Health(interval=0.2, timeout=2, threshold=2, restarts=2)
        members = Membership(engines, router, health=health, start_deadline_s=60, pause_s=0)
        stack.push_async_callback(members.stop)
        router.start()
        stack.push_async_callback(router.stop)
        await router.wait_ready(60)
        for engine in engines:
            await members.admit(engine)
        members.watch()
        client = GenerationClient(
            router.url,
            ModelShape(10),
            30.0,
            on_lost=members.look,
            outage=members.outage,
            retries=1,
            api_key=router.keys.api_key,
        )
        yield Stand(router, servers, members, await stack.enter_async_context(client))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda signum: signum.name)
async def test_a_killed_or_stopped_router_returns_without_failed_requests(signum, tmp_path):
    async with asyncio.timeout(120), serving(tmp_path) as stand:
        asking = [asyncio.create_task(stand.client.generate(GenerationRequest([1], {}, seed))) for seed in range(6)]
        while sum(server.requests for server in stand.servers) < 6:
            await asyncio.sleep(0.01)
        before = stand.process
        before.send_signal(signum)
        late = [asyncio.create_task(stand.client.generate(GenerationRequest([1], {}, seed))) for seed in range(6, 9)]
        while not stand.members.keeper.restarts.history:
            await asyncio.sleep(0.05)
        for server in stand.servers:
            server.open.set()
        completions = await asyncio.gather(*asking, *late)
        assert all(completion.token_ids.tolist() == [4] for completion in completions)
        assert 6 <= stand.client.retried <= 9, "those that were in it, counted"
        assert not before.is_running() and stand.process.pid != before.pid
        (restart,) = stand.members.history()
        assert (restart.part, restart.error) == ("router", "") and restart.reason
        assert stand.members.failure() is None and stand.members.lost == 0 and not stand.members.outage.lasts
        known = {worker["url"] for worker in await stand.router.workers()}
        assert known == {engine.url for engine in stand.members.engines}
