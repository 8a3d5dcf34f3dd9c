"""Real servers of a Qwen3-Next and a Qwen3.5 on the CPU: the states that requests carry besides their KV are right
through chunked prefill, batches whose requests come and go, retraction, pauses and publications. The measure is
transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slimx.engines.server.engine import Engine, PauseMode
from slimx.engines.server.spec import EngineSpec
from tests.integration.conftest import START_S, Weights, perturbed, publish
from tests.integration.engine_families import make_model
from tests.integration.engine_oracle import logprobs_of

pytestmark = [pytest.mark.integration, pytest.mark.slow("two servers of their own")]

BOUND = 1e-4
NEW, REQUESTS, CHUNK, ROOM = 80, 8, 16, 256
"""Tokens of an answer, requests at once, tokens of a part of a prompt, and tokens whose KV fits: of two answers."""


@dataclass(frozen=True, slots=True)
class Answer:
    ids: list[int]
    """Prompt and answer."""
    logprobs: np.ndarray
    """Log-probs of all tokens but the first."""
    sampled: int
    """Tokens of the answer."""
    retractions: int
    """How often SGLang took its KV and its states away."""


@dataclass(frozen=True, slots=True)
class Stand:
    engine: Engine
    weights: Weights
    oracle: PreTrainedModel

    def errors(self, weights: Weights, answer: Answer) -> np.ndarray:
        """Returns the differences of the log-probs from those that transformers gives with `weights`."""
        return np.abs(answer.logprobs - logprobs_of(self.oracle, weights, answer.ids))

    def assert_right(self, answer: Answer) -> None:
        assert self.errors(self.weights, answer).max() <= BOUND

    async def answer(self, seed: int) -> Answer:
        """Returns the answer to a prompt whose length depends on `seed`."""
        prompt = torch.randint(4, 128, (3 + 5 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        # Without ignore_eos, with which SGLang lets no more requests in than can end without a retraction.
        sampling = {"temperature": 1.0, "max_new_tokens": NEW, "sampling_seed": seed}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        how = {"key": self.engine.spec.keys.api_key, "deadline_s": START_S}
        meta = (await self.engine.wire.call("/generate", body, **how))["meta_info"]
        scored = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        ids = [*prompt, *(token for _, token, _ in meta["output_token_logprobs"])]
        logprobs = np.array([logprob for logprob, _, _ in scored])
        return Answer(ids, logprobs, meta["completion_tokens"], meta["num_retractions"])

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[list[asyncio.Future]]:
        """Answers to all prompts, which are under way inside the block and done after it."""
        answers = [asyncio.ensure_future(self.answer(seed)) for seed in range(REQUESTS)]
        await asyncio.sleep(0.7)
        assert not all(answer.done() for answer in answers)
        yield answers
        await asyncio.gather(*answers)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    model = tmp_path_factory.mktemp(request.param)
    make_model(request.param, model)
    # Requests are let in as if they were to end at once, so that some have to be retracted.
    sglang = {"chunked_prefill_size": CHUNK, "schedule_conservativeness": 0.0}
    spec = EngineSpec("states", str(model), "float32", "cpu", max_total_tokens=ROOM, sglang=sglang)
    engine = Engine(spec, tmp_path_factory.mktemp("log") / "server.log")
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    try:
        asyncio.run(engine.start(START_S))
        yield Stand(engine, load_file(model / "model.safetensors"), oracle)
    finally:
        asyncio.run(engine.stop())


async def test_retracted_requests_keep_their_recurrent_states(stand: Stand) -> None:
    async with stand.answering() as answers:
        pass
    answers = [answer.result() for answer in answers]
    assert any(answer.retractions for answer in answers)
    for answer in answers:
        stand.assert_right(answer)
    alone = await stand.answer(REQUESTS - 1)
    assert alone.ids == answers[-1].ids


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_changes_no_state(stand: Stand, mode: PauseMode) -> None:
    async with stand.answering() as answers:
        for _ in range(3):
            await stand.engine.pause(mode)
            await stand.engine.resume()
            await asyncio.sleep(0.2)
    for answer in answers:
        stand.assert_right(answer.result())


async def test_after_a_publication_states_are_those_of_the_new_weights(stand: Stand) -> None:
    """A retracted request is prefilled again, so that later tokens know nothing of the old weights."""
    # Moved by more, transformers' own two forms of the rule are more than BOUND apart (docs/models.md).
    other = perturbed(stand.weights, 3, scale=0.01)
    async with stand.answering() as answers:
        await publish(stand.engine, other, 1)
    cut_inside = 0
    for answer in (answer.result() for answer in answers):
        old, new = (stand.errors(weights, answer)[-answer.sampled :] <= BOUND for weights in (stand.weights, other))
        cut = answer.sampled if old.all() else int(np.argmin(old))
        assert new[cut:].all(), (cut, old, new)
        cut_inside += 0 < cut < answer.sampled
    assert cut_inside
    await publish(stand.engine, stand.weights, 2)
    stand.assert_right(await stand.answer(4))
