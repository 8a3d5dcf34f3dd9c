"""Which engine a request goes to: the real router in front of two stand-ins for servers."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp.web
import pytest

from slimx.engines.server.router import Router
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.runtime.ports import free_port

pytestmark = pytest.mark.integration

TOKENS = {"max_new_tokens": 2}


class Worker:
    """Answers as a server would, while `open`; while `dropping`, it closes every connection instead."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.dropping = False
        self.url = ""

    async def generate(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        ids = (await request.json())["input_ids"]
        if self.dropping:
            request.transport.abort()
            return aiohttp.web.Response()
        self.prompts.append(ids)
        await self.open.wait()
        meta = {
            "output_token_logprobs": [[-1.0, 4, None]],
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "cached_tokens": 0,
        }
        return aiohttp.web.json_response({"meta_info": meta})

    async def about(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"model_path": "m", "is_generation": True})


@asynccontextmanager
async def routed(log: Path, *, by_key: bool) -> AsyncIterator[tuple[Router, list[Worker]]]:
    silent = logging.getLogger("tests.affinity")
    silent.disabled = True  # the router greets in HTTP/2, which the stand-ins complain of
    workers, runners = [Worker(), Worker()], []
    router = Router(free_port(), free_port(), log, by_key=by_key)
    router.start()
    try:
        await router.wait_ready(30)
        for worker in workers:
            app = aiohttp.web.Application()
            app.router.add_post("/generate", worker.generate)
            app.router.add_get("/{path:.*}", worker.about)
            runner = aiohttp.web.AppRunner(app, shutdown_timeout=0.1, logger=silent)
            runners.append(runner)
            await runner.setup()
            await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
            worker.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await router.add(worker.url)
        yield router, workers
    finally:
        await router.stop()
        for runner in runners:
            await runner.cleanup()


async def ask(router: Router, workers: list[Worker], *, keyed: bool) -> None:
    """Sends 8 groups of 4 rollouts of 2 turns; prompts begin with the same 200 tokens and differ in the last 4. A
    group's first turns have reached a worker before the next group comes, and no turn ends before all groups have come:
    the load that the router sees of a worker does not depend on timing."""
    for worker in workers:
        worker.open.clear()
    key = router.keys.api_key
    async with GenerationClient(router.url, ModelShape(1000), api_key=key) as client, asyncio.TaskGroup() as rollouts:

        async def rollout(group: int, index: int) -> None:
            for turn in range(2):
                ids, key = [7] * 200 + [100 + group] * 4 + [5] * turn, f"g{group}" if keyed else None
                await client.generate(GenerationRequest(ids, TOKENS, seed=index, affinity=key))

        for group in range(8):
            for index in range(4):
                rollouts.create_task(rollout(group, index))
            async with asyncio.timeout(30):
                while sum(len(worker.prompts) for worker in workers) < 4 * (group + 1):
                    await asyncio.sleep(0.005)
        for worker in workers:
            worker.open.set()


def homes(workers: list[Worker]) -> dict[int, set[int]]:
    """Returns the workers that saw each group."""
    seen: dict[int, set[int]] = defaultdict(set)
    for number, worker in enumerate(workers):
        for ids in worker.prompts:
            seen[ids[200]].add(number)
    return seen


async def test_keys_keep_groups_together_until_their_engine_is_lost(tmp_path: Path) -> None:
    async with routed(tmp_path / "log", by_key=True) as (router, workers):
        await ask(router, workers, keyed=True)
        assert [len(where) for where in homes(workers).values()] == [1] * 8
        assert sorted(len(worker.prompts) for worker in workers) == [32, 32], "4 groups each"

        async def look() -> None:
            """Removes the lost engine from the router before the request is sent again, as the engines' owner does."""
            await router.remove(next(worker for worker in workers if worker.dropping).url)

        async with GenerationClient(router.url, ModelShape(1000), on_lost=look, api_key=router.keys.api_key) as client:
            await client.generate(GenerationRequest([1, 2], TOKENS, seed=1, affinity="later"))
            first, other = sorted(workers, key=lambda worker: worker.prompts[-1] != [1, 2])
            first.dropping = True
            await client.generate(GenerationRequest([1, 2, 3], TOKENS, seed=1, affinity="later"))
            assert other.prompts[-1] == [1, 2, 3] and client.retried == 1


async def test_without_keys_a_common_prefix_gathers_all_groups_on_one_engine(tmp_path: Path) -> None:
    """Shows why there are keys: `rollout.affinity: prefix` sends prompts with one long beginning to one engine."""
    async with routed(tmp_path / "log", by_key=False) as (router, workers):
        await ask(router, workers, keyed=False)
        assert max(len(worker.prompts) for worker in workers) >= 56
