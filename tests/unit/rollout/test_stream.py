"""Tokens arrive while they are sampled, and a stream that breaks off goes on elsewhere, or fails by name."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp.web
import numpy as np
import pytest

from slimx.errors import DeadlineError
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.sending import AnswerError
from tests.refusals import refused

SHAPE = ModelShape(1000, layers=2, top_k=1, experts=4)
TOKENS = [50, 51, 52, 53, 54, 3]
"""Tokens that a seed samples after the prompt [1, 2]; position decides, as in the engines."""


class Server:
    """A fake server whose token at position p is `TOKENS[p - 2]`; its attempts end after `breaks` tokens each."""

    def __init__(self, breaks: tuple[int, ...] = (), *, incremental: bool = False, versions: tuple[int, ...] = (7,)):
        self.breaks, self.incremental, self.versions = breaks, incremental, versions
        self.bodies: list[dict[str, Any]] = []
        self.events: list[Any] | None = None
        """Sent instead, if any."""
        self.left = asyncio.Event()
        self.pause = 0.0

    async def generate(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        if not body["stream"]:
            return aiohttp.web.json_response({"meta_info": self.scores(body["input_ids"])})
        response = aiohttp.web.StreamResponse()
        await response.prepare(request)
        try:
            for event in self.events if self.events is not None else self.metas(body, number):
                await asyncio.sleep(self.pause)
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        if number < len(self.breaks):
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    def metas(self, body: dict[str, Any], number: int) -> list[dict[str, Any]]:
        begin = len(body["input_ids"]) - 2
        tokens = TOKENS[begin : begin + body["sampling_params"]["max_new_tokens"]]
        finish = {"type": "stop" if tokens[-1] == 3 else "length"}
        version = self.versions[min(number, len(self.versions) - 1)]
        stop = self.breaks[number] if number < len(self.breaks) else len(tokens)
        out = []
        for count in range(1, stop + 1):
            shown = tokens[count - 1 : count] if self.incremental else tokens[:count]
            meta = {
                "output_token_logprobs": [[-token / 8, token, None] for token in shown],
                "completion_tokens": count,
                "weight_versions": [{"version": str(version), "start": 0, "end": count}],
                "weight_version": str(version),
                "finish_reason": finish if count == len(tokens) else None,
                "cached_tokens": 0,
            }
            if "top_k" in body["sampling_params"]:
                meta["output_token_sampling_mask"] = [[token, 9] for token in shown]
                meta["output_token_sampling_logprobs"] = [-0.5 for _ in shown]
            if meta["finish_reason"] and "custom_labels" in body:
                meta["routed_experts"] = routes(len(body["input_ids"]) + count - 1)
            out.append({"meta_info": meta})
        return out

    def scores(self, ids: list[int]) -> dict[str, Any]:
        scored = [[-1.0, token, None] for token in ids]
        return {"input_token_logprobs": scored, "weight_version": "7", "routed_experts": routes(len(ids) - 1)}


def routes(rows: int) -> str:
    return base64.b64encode(np.arange(rows * 2, dtype=np.int32) % 4).decode()


async def _nothing() -> None: ...


@asynccontextmanager
async def client_of(
    server: Server, on_lost: Callable[[], Awaitable[None]] = _nothing, **options: Any
) -> AsyncIterator[GenerationClient]:
    app = aiohttp.web.Application()
    app.router.add_post("/generate", server.generate)
    runner = aiohttp.web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with GenerationClient(url, SHAPE, on_lost=on_lost, **options) as client:
            yield client
    finally:
        await runner.cleanup()


SAMPLING = {"temperature": 0.5, "max_new_tokens": 10}


@pytest.mark.parametrize("incremental", [False, True])
async def test_pieces_are_the_new_tokens_and_the_whole_is_a_completion(incremental):
    server, began = Server(incremental=incremental), time.monotonic()
    async with client_of(server) as client, client.stream(GenerationRequest([1, 2], SAMPLING, 9, True)) as stream:
        pieces = [piece async for piece in stream]
        whole = stream.completion
    assert [piece.token_ids.tolist() for piece in pieces] == [[token] for token in TOKENS]
    assert [piece.finish_reason for piece in pieces] == [""] * 5 + ["stop"]
    assert [piece.versions for piece in pieces] == [[(0, 1, 7)]] * 6
    assert whole.token_ids.tolist() == TOKENS and whole.versions == [(0, 6, 7)]
    assert whole.logprobs.tolist() == [-token / 8 for token in TOKENS] and whole.temperature == 0.5
    assert whole.finish_reason == "stop" and whole.routed_experts.shape == (2 + 6 - 1, 2, 1)
    assert whole.seconds == pytest.approx(sum(piece.seconds for piece in pieces))
    assert 0 < whole.seconds <= time.monotonic() - began, "no moment is counted twice"
    assert server.bodies[0]["sampling_params"]["sampling_seed"] == 9


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_broken_stream_continues_with_the_versions_of_both(incremental):
    looks: list[int] = []

    async def look() -> None:
        looks.append(1)

    server = Server(breaks=(2, 1), incremental=incremental, versions=(7, 8, 8))
    sampling = {**SAMPLING, "top_k": 2, "min_new_tokens": 3}
    async with client_of(server, look) as client, client.stream(GenerationRequest([1, 2], sampling, 9, True)) as stream:
        tokens = [token async for piece in stream for token in piece.token_ids.tolist()]
        whole = stream.completion
    assert tokens == whole.token_ids.tolist() == TOKENS, "no token twice, none lost"
    assert whole.versions == [(0, 2, 7), (2, 6, 8)]
    assert whole.support.counts.tolist() == [2] * 6 and whole.logprobs.tolist() == [-0.5] * 6
    assert len(whole.routed_experts) == 2 + 6 - 1
    assert client.retried == len(looks) == 2
    sent = [(body["input_ids"], body["sampling_params"]) for body in server.bodies]
    assert [ids for ids, _ in sent] == [[1, 2], [1, 2, 50, 51], [1, 2, 50, 51, 52]]
    assert [(s["max_new_tokens"], s["min_new_tokens"], s["sampling_seed"]) for _, s in sent] == [
        (10, 3, 9),
        (8, 1, 9),
        (7, 0, 9),
    ]


async def test_a_stream_that_breaks_off_too_often_fails_by_name():
    async with (
        client_of(Server(breaks=(1, 1, 1)), retries=1) as client,
        client.stream(GenerationRequest([1, 2], SAMPLING, 9)) as stream,
    ):
        with refused("request.lost", about=f"{client.url}/generate"):
            async for _ in stream:
                pass
        assert client.retried == 1


async def test_a_stream_that_may_have_begun_a_stop_string_is_not_continued():
    sampling = {**SAMPLING, "stop": ["ab"]}
    async with (
        client_of(Server(breaks=(2,))) as client,
        client.stream(GenerationRequest([1, 2], sampling, 9)) as stream,
    ):
        with refused("request.stop_string", about="stop"):
            async for _ in stream:
                pass
        assert stream.completion.token_ids.tolist() == TOKENS[:2]


async def test_a_stream_that_breaks_off_before_its_first_token_is_sent_again():
    server = Server(breaks=(0,))
    async with (
        client_of(server) as client,
        client.stream(GenerationRequest([1, 2], {**SAMPLING, "stop": ["ab"]}, 9)) as stream,
    ):
        assert [piece.token_ids[0] async for piece in stream] == TOKENS
    assert server.bodies[0] == server.bodies[1]


async def test_leaving_a_stream_early_ends_the_request_with_partial_results():
    server = Server()
    server.pause = 0.05
    async with client_of(server) as client:
        async with client.stream(GenerationRequest([1, 2], SAMPLING, 9, True)) as stream:
            async for piece in stream:
                if piece.token_ids[0] == 51:
                    break
        whole = stream.completion
        assert whole.token_ids.tolist() == [50, 51] and whole.finish_reason == "stop"
        assert whole.routed_experts.shape == (2 + 2 - 1, 2, 1), "asked for in a request of its own"
        assert server.bodies[1]["input_ids"] == [1, 2, 50, 51]
        await asyncio.wait_for(server.left.wait(), 60)


async def test_one_deadline_covers_the_stream_and_its_continuations():
    server = Server(breaks=(1,))
    server.pause, received = 2, []
    async with (
        client_of(server, deadline_s=5) as client,
        client.stream(GenerationRequest([1, 2], SAMPLING, 9)) as stream,
    ):
        async with asyncio.timeout(300):
            with refused("deadline", about="a generation request", kind=DeadlineError):
                async for chunk in stream:
                    received.append(chunk)
        # At 2 and 4 s; with a deadline for each attempt there would be one at 6 s.
        assert len(server.bodies) == 2 and len(received) <= 2


async def test_a_servers_refusal_is_passed_on_verbatim():
    server = Server()
    refusal = "the prompt is too long"
    server.events = [{"error": {"message": refusal, "code": 400}}]
    async with client_of(server) as client, client.stream(GenerationRequest([1, 2], SAMPLING, 9)) as stream:
        with refused("request.refused", kind=AnswerError) as caught:
            await anext(aiter(stream))
        assert (caught.value.status, caught.value.message) == (400, refusal)
        with refused("request.no_token"):
            _ = stream.completion
