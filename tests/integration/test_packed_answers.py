"""Packed answers of a real SGLang server, through a real router: the same numbers as in SGLang's JSON, bit for bit."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from slimx.engines.server.engine import Engine
from slimx.engines.server.keys import bearer
from slimx.engines.server.router import Router
from slimx.models.families import read_model
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.reader import Reader
from slimx.rollout.client.request import GenerationRequest
from slimx.runtime.ports import free_port
from tests.integration.conftest import Weights, publish
from tests.integration.engine_oracle import PROMPT

pytestmark = pytest.mark.integration

SAMPLING = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True}
ROUTES = {"return_routed_experts": True}
MASK = {"return_sampling_mask": True}


async def post(url: str, engine: Engine, sampling: dict[str, Any], **fields: Any) -> tuple[int, str, bytes]:
    """Returns (status, content type, body) of a request whose label has `fields`."""
    body = {"input_ids": PROMPT, "sampling_params": {**SAMPLING, "sampling_seed": 3, **sampling}}
    body |= {"return_logprob": True, "stream": fields.pop("stream", False)}
    if fields:
        body["custom_labels"] = {"slimx": json.dumps(fields)}
    headers = bearer(engine.spec.keys.api_key)
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/generate", json=body) as response,
    ):
        return response.status, response.content_type, await response.read()


async def test_packed_answers_are_those_in_json_bit_for_bit(
    engine: Engine, tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    await publish(engine, tiny_weights, 4)
    router = Router(free_port(), free_port(), tmp_path / "router.log", keys=engine.spec.keys)
    router.start()
    try:
        await router.wait_ready(30)
        await router.add(engine.spec.url)
        for sampling, fields in (({}, {}), ({}, ROUTES), ({"top_k": 5}, ROUTES | MASK)):
            status, kind, body = await post(router.url, engine, sampling, **fields)
            assert (status, kind) == (200, "application/json")
            plain = json.loads(body)["meta_info"]
            status, kind, body = await post(router.url, engine, sampling, packed="uint8", **fields)
            assert (status, kind) == (200, "application/msgpack")
            packed = msgspec.msgpack.decode(body)["meta_info"]
            ids = [entry[1] for entry in plain["output_token_logprobs"]]
            logprobs = [entry[0] for entry in plain["output_token_logprobs"]]
            if "top_k" in sampling:
                logprobs = plain["output_token_sampling_logprobs"]
                mask = plain["output_token_sampling_mask"]
                assert np.frombuffer(packed["support_ids"], np.int32).tolist() == sum(mask, [])
                assert np.frombuffer(packed["support_counts"], np.int32).tolist() == [len(row) for row in mask]
            assert np.frombuffer(packed["token_ids"], np.int32).tolist() == ids and len(ids) == 12
            assert np.frombuffer(packed["logprobs"], np.float32).astype(float).tolist() == logprobs
            assert ("routed_experts" in packed) == bool(fields)
            if fields:
                routes = np.frombuffer(base64.b64decode(plain["routed_experts"]), np.int32)
                assert np.frombuffer(packed["routed_experts"], np.uint8).tolist() == routes.tolist() and routes.any()
            for name in ("weight_version", "weight_versions", "finish_reason"):
                assert packed[name] == plain[name]
        async with GenerationClient(
            router.url, shape := ModelShape.of(read_model(tiny_model)), api_key=router.keys.api_key
        ) as client:
            request = GenerationRequest(PROMPT, SAMPLING | {"top_k": 5}, 3, routed_experts=True)
            completion = await client.generate(request)
            async with client.stream(request) as stream:
                pieces = [piece async for piece in stream]
        read = await Reader("", shape).completion(plain, request, 0.0)
        assert len(pieces) > 1
        for other in (completion, stream.completion):
            assert other.token_ids.tolist() == read.token_ids.tolist() == ids
            assert other.logprobs.tobytes() == read.logprobs.tobytes() and other.versions == read.versions
            assert other.support.ids.tolist() == read.support.ids.tolist()
            assert other.routed_experts.dtype == np.uint8
            np.testing.assert_array_equal(other.routed_experts, read.routed_experts)
    finally:
        await router.stop()


async def test_packed_routes_have_the_dtype_that_is_asked_for(engine: Engine, tiny_weights: Weights) -> None:
    await publish(engine, tiny_weights, 4)
    answers = [await post(engine.spec.url, engine, {}, packed=name, **ROUTES) for name in ("uint8", "uint16")]
    narrow, wide = (msgspec.msgpack.decode(body)["meta_info"]["routed_experts"] for _, _, body in answers)
    assert np.frombuffer(wide, np.uint16).tolist() == list(narrow)
    status, _, _ = await post(engine.spec.url, engine, {}, packed="float64", **ROUTES)
    assert status == 400
    status, _, body = await post(engine.spec.url, engine, {}, packed="uint8", stream=True, **ROUTES)
    last = json.loads(body.split(b"data: ")[-2])["meta_info"]
    assert base64.b64decode(last["routed_experts"]) == narrow


async def test_an_interrupted_packed_request_returns_its_tokens(
    engine: Engine, tiny_model: Path, tiny_weights: Weights
) -> None:
    await publish(engine, tiny_weights, 4)
    shape = ModelShape.of(read_model(tiny_model))
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        long = GenerationRequest(PROMPT, SAMPLING | {"max_new_tokens": 2000}, 3, routed_experts=True)
        request = asyncio.create_task(client.generate(long))
        await asyncio.sleep(1.0)
        await engine.interrupt()
        part = await asyncio.wait_for(request, 60)
        assert part.finish_reason == "abort" and 0 < len(part.token_ids) < 2000
        assert part.versions == [(0, len(part.token_ids), 4)] and len(part.logprobs) == len(part.token_ids)
        assert len(part.routed_experts) == len(PROMPT) + len(part.token_ids) - 1
