"""A request that is lost with its engine is sent again, the same request, a bounded number of times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp.web
import numpy as np
import pytest

from slimx.engines.outage import Outage
from slimx.engines.server.keys import Keys
from slimx.errors import DeadlineError
from slimx.orchestration.engines.service import prober
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.sending import KEY_HEADER, AnswerError
from slimx.rollout.hooks import seed_of
from slimx.runtime.ports import free_port
from tests.refusals import refused
from tests.unit.rollout.rollout_stand import config_of

GOOD = (
    200,
    {
        "meta_info": {
            "output_token_logprobs": [[-1.5, 4, None]],
            "finish_reason": {"type": "stop"},
            "weight_version": "6",
            "cached_tokens": 0,
        }
    },
)
LOST = 500, {"error": {"code": "call_upstream_request_error", "message": "error sending request"}}
NO_ENGINE = 503, {"error": {"message": "no available workers"}}
REFUSAL = 400, {"error": {"message": "the prompt is too long"}}
FAULT = 500, {"error": {"message": "the server's own mistake"}}


async def _nothing() -> None: ...


@asynccontextmanager
async def client_of(
    *answers: tuple[int, dict], on_lost: Callable[[], Awaitable[None]] = _nothing, **options: Any
) -> AsyncIterator[tuple[GenerationClient, list[dict]]]:
    """Yields a client of a fake router that gives `answers` in turn, and then its last one; and the bodies it got."""
    bodies: list[dict] = []

    async def generate(request: aiohttp.web.Request) -> aiohttp.web.Response:
        bodies.append(await request.json())
        if (key := request.headers.get(KEY_HEADER)) is not None:
            bodies[-1]["key"] = key
        status, answer = answers[min(len(bodies), len(answers)) - 1]
        return aiohttp.web.json_response(answer, status=status)

    app = aiohttp.web.Application()
    app.router.add_post("/generate", generate)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with GenerationClient(url, ModelShape(10), on_lost=on_lost, **options) as client:
            yield client, bodies
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_lost_request_is_repeated_with_the_same_seed(retries):
    for lost in range(retries + 2):
        looks: list[int] = []

        async def look(looks: list[int] = looks) -> None:
            looks.append(1)

        async with client_of(*[LOST] * lost, GOOD, retries=retries, on_lost=look) as (client, bodies):
            if lost <= retries:
                assert (
                    await client.generate(GenerationRequest([1, 2], {"max_new_tokens": 3}, seed=9))
                ).token_ids.tolist() == [4]
            else:
                with pytest.raises(AnswerError) as caught:
                    await client.generate(GenerationRequest([1, 2], {"max_new_tokens": 3}, seed=9))
                assert (caught.value.status, caught.value.message) == (500, "error sending request")
            assert len(bodies) == 1 + min(lost, retries) and all(body == bodies[0] for body in bodies)
            assert bodies[0]["sampling_params"]["sampling_seed"] == 9
            assert client.retried == len(looks) == min(lost, retries)


async def test_a_request_that_finds_no_engine_waits_for_one_and_that_is_no_retry():
    async with client_of(NO_ENGINE, LOST, NO_ENGINE, NO_ENGINE, GOOD, retries=1) as (client, bodies):
        await client.generate(GenerationRequest([1], {}, seed=1))
        assert (len(bodies), client.retried) == (5, 1)
    async with client_of(NO_ENGINE, retry_s=0.2) as (client, bodies):
        with pytest.raises(AnswerError) as caught:
            await client.generate(GenerationRequest([1], {}, seed=1))
        assert (caught.value.status, caught.value.message) == (503, "no available workers")
        assert client.retried == 0


async def test_a_refused_request_is_final_a_failed_one_is_repeated():
    """Another engine may answer what this one fails; the look finds out whether this one fails everything."""
    for answer, sent in (REFUSAL, 1), (FAULT, 3):
        looks: list[int] = []

        async def look(looks: list[int] = looks) -> None:
            looks.append(1)

        async with client_of(answer, on_lost=look) as (client, bodies):
            with pytest.raises(AnswerError) as caught:
                await client.generate(GenerationRequest([1], {}, seed=1))
            assert (caught.value.status, caught.value.code) == (answer[0], "request.refused")
            assert len(bodies) == sent and len(looks) == sent - 1


async def test_requests_wait_for_engines_without_losing_deadline_or_retries():
    outage = Outage()
    outage.begin()
    async with client_of(LOST, GOOD, outage=outage, deadline_s=3, retry_s=0.1, retries=1) as (client, bodies):
        asking = asyncio.create_task(client.generate(GenerationRequest([1], {}, seed=1)))
        await asyncio.sleep(3.3)
        assert not asking.done() and not bodies, "longer than its deadline"
        outage.end()
        await asking
        assert client.retried == 1


async def test_a_stream_that_waits_for_an_engine_has_its_deadline_left():
    outage = Outage()
    outage.begin()
    async with client_of(NO_ENGINE, outage=outage, deadline_s=3) as (client, bodies):

        async def read() -> None:
            async with client.stream(GenerationRequest([1], {}, 1)) as stream:
                async for _ in stream:
                    pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(3.3)
        assert not reading.done() and not bodies
        outage.end()
        with pytest.raises(DeadlineError):
            await asyncio.wait_for(reading, 60)
        assert bodies


async def test_a_router_that_does_not_listen_is_waited_for_and_that_is_no_retry():
    port = free_port()
    async with GenerationClient(f"http://127.0.0.1:{port}", ModelShape(10), retry_s=20, retries=0) as client:
        asking = asyncio.create_task(client.generate(GenerationRequest([1], {}, seed=1)))
        await asyncio.sleep(0.3)
        assert not asking.done()

        async def generate(request: aiohttp.web.Request) -> aiohttp.web.Response:
            return aiohttp.web.json_response(GOOD[1])

        app = aiohttp.web.Application()
        app.router.add_post("/generate", generate)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        try:
            await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
            await asyncio.wait_for(asking, 300)
        finally:
            await runner.cleanup()
        assert client.retried == 0


async def test_a_probe_asks_the_server_itself_once_for_what_rollouts_ask_for():
    shape = ModelShape(10, layers=1, top_k=1, experts=4)
    probe = prober(shape, config_of())
    async with client_of(FAULT) as (broken, bodies), client_of(GOOD) as (without_experts, _):
        with pytest.raises(AnswerError):
            await probe(SimpleNamespace(url=broken.url, spec=SimpleNamespace(keys=Keys("key"))))
        assert (
            len(bodies) == 1 and bodies[0]["return_logprob"] and "routed_experts" in bodies[0]["custom_labels"]["slimx"]
        )
        with refused("answer.experts", about=without_experts.url):
            await probe(SimpleNamespace(url=without_experts.url, spec=SimpleNamespace(keys=Keys("key"))))


async def test_the_deadline_of_a_request_covers_all_its_attempts():
    async with client_of(NO_ENGINE, deadline_s=0.3) as (client, _), asyncio.timeout(60):
        with refused("deadline", about="a generation request", kind=DeadlineError):
            await client.generate(GenerationRequest([1], {}, seed=1))


async def test_a_request_with_a_key_takes_another_one_when_it_was_lost():
    """An engine that loses requests, but is not taken out of the router, must not hold them by their key."""
    async with client_of(LOST, LOST, GOOD, GOOD) as (client, bodies):
        for _ in range(2):
            await client.generate(GenerationRequest([1], {}, seed=1, affinity="g7"))
        await client.generate(GenerationRequest([1], {}, seed=1))
        assert [body.get("key") for body in bodies] == ["g7", "g7~1", "g7~2", "g7", None]


def test_seeds_are_those_of_numpy_on_every_machine():
    for parts in ((0,), (1, 2, 3), (-1, 2**40 + 7, 0, 5, 6)):
        words = [part & 0xFFFFFFFF for part in parts]
        assert seed_of(*parts) == np.random.SeedSequence(words).generate_state(1)[0] >> 1
