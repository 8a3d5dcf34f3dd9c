"""A real server aborts, later continues: under one version the tokens are those of an uninterrupted request, under two
each token has the version, the log-prob and the routes of the request that sampled it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from slimx.engines.server.engine import Engine
from slimx.models.families import read_model
from slimx.rollout.client.completion import Completion, ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.flow.gate import Gate
from slimx.rollout.flow.interruption import Interruptible
from slimx.rollout.flow.progress import Journal
from slimx.rollout.flow.slots import Slots
from slimx.runtime.clocks import Clock
from tests.integration.conftest import Weights, perturbed, publish

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TOKENS = 200
SAMPLING = {"temperature": 0.8, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture
def shape(tiny_model: Path) -> ModelShape:
    return ModelShape.of(read_model(tiny_model))


class Stand:
    """The engines of one rollout behind a gate of their own."""

    def __init__(self, client: GenerationClient) -> None:
        self.gate, self.journal = Gate(), Journal()
        self.engines = Interruptible(client, Slots(100), Clock(600), self.gate, self.journal)


async def test_interrupted_requests_bring_the_tokens_of_uninterrupted_ones(
    engine: Engine, tiny_weights: Weights, shape: ModelShape
) -> None:
    await publish(engine, tiny_weights, 1)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        seeds = range(20)
        whole = await asyncio.gather(
            *(client.generate(GenerationRequest(PROMPT, SAMPLING, seed, True)) for seed in seeds)
        )
        stand = Stand(client)
        # More than the server runs at once: some are still in its queue when they are interrupted.
        requests = [
            asyncio.ensure_future(stand.engines.generate(GenerationRequest(PROMPT, SAMPLING, seed, True)))
            for seed in seeds
        ]
        read = asyncio.ensure_future(streamed(stand, seed=3))
        for _ in range(3):
            await asyncio.sleep(0.3)
            await stand.gate.close(engine.interrupt, 20)
            assert stand.gate.out == 0
            stand.gate.open()
        parts = await asyncio.gather(*requests)
        pieces, streamed_whole = await read
    assert engine.state.name == "READY"
    for part, expected in zip(parts, whole, strict=True):
        assert part.token_ids.tolist() == expected.token_ids.tolist()
        assert part.versions == [(0, TOKENS, 1)] and part.finish_reason == "length"
        np.testing.assert_allclose(part.logprobs, expected.logprobs, atol=1e-5)
        assert part.routed_experts.shape == expected.routed_experts.shape
        same = np.sort(part.routed_experts) == np.sort(expected.routed_experts)
        assert same.mean() > 0.999, "a near tie may fall the other way in another batch"
    assert streamed_whole.token_ids.tolist() == whole[3].token_ids.tolist() == pieces
    assert streamed_whole.routed_experts.shape == whole[3].routed_experts.shape


async def streamed(stand: Stand, seed: int) -> tuple[list[int], Completion]:
    pieces: list[int] = []
    async with stand.engines.stream(GenerationRequest(PROMPT, SAMPLING, seed, True)) as stream:
        async for piece in stream:
            pieces += piece.token_ids.tolist()
    return pieces, stream.completion


async def test_tokens_keep_the_version_and_log_prob_of_their_request(
    engine: Engine, tiny_weights: Weights, shape: ModelShape
) -> None:
    await publish(engine, tiny_weights, 1)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        stand, sampling = Stand(client), SAMPLING | {"temperature": 1.0}
        request = asyncio.ensure_future(stand.engines.generate(GenerationRequest(PROMPT, sampling, 7, True)))
        while not stand.journal.entries():  # again if it had not left the server's queue
            stand.gate.open()
            await asyncio.sleep(0.3)
            await stand.gate.close(engine.interrupt, 20)
        (entry,) = stand.journal.entries()
        cut = len(entry.completion.token_ids)
        assert 0 < cut < TOKENS and entry.completion.finish_reason == "abort"
        old = (await client.score([*PROMPT, *entry.completion.token_ids.tolist()])).logprobs
        await publish(engine, perturbed(tiny_weights, 5), 2)
        # A run that is resumed in between has the journal alone.
        resumed = Stand(client)
        resumed.engines = Interruptible(client, Slots(100), Clock(600), resumed.gate, Journal([entry]))
        stand.gate.open()
        whole, again = await asyncio.gather(
            request, resumed.engines.generate(GenerationRequest(PROMPT, sampling, 7, True))
        )
        new = (await client.score([*PROMPT, *whole.token_ids.tolist()])).logprobs
    assert whole.versions == again.versions == [(0, cut, 1), (cut, TOKENS, 2)]
    assert whole.token_ids.tolist() == again.token_ids.tolist()
    start = len(PROMPT) - 1
    np.testing.assert_allclose(whole.logprobs[:cut], old[start:], atol=1e-4)
    np.testing.assert_allclose(whole.logprobs[cut:], new[start + cut :], atol=1e-4)
    assert np.abs(whole.logprobs[:cut] - new[start : start + cut]).max() > 0.01, "the versions do differ"
    rows = start + cut
    np.testing.assert_array_equal(whole.routed_experts[:rows], entry.completion.routed_experts)
