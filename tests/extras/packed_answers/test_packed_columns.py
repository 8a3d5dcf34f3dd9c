"""Packed answers are what JSON answers are, whatever a request asks for; others are answered by SGLang alone."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import aiohttp.web
import msgspec
import numpy as np
import pytest
import torch

from slimx.engines.server.http_calls import parse_body
from slimx.extras.packed_answers.adapters import sglang
from slimx.rollout.client.completion import Completion, ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.client.reader import Reader
from slimx.rollout.client.request import GenerationRequest
from tests.refusals import refused

RANDOM = np.random.default_rng(1)
WIDE = ModelShape(2000, layers=3, top_k=2, experts=300)
NARROW = ModelShape(2000, layers=3, top_k=2, experts=256)
TOKENS = 5


def state_of(request: Any, logprobs: list[float]) -> Any:
    """A ReqState that has sampled as many tokens as there are log-probs."""
    ids = list(range(1000, 1000 + len(logprobs)))
    return SimpleNamespace(obj=request, output_token_logprobs_val=logprobs, output_token_logprobs_idx=ids)


def request_of(**fields: Any) -> Any:
    return SimpleNamespace(**{"stream": False, "bootstrap_room": None, "sampling_params": {}} | fields)


def plain(manager: object, meta: dict[str, Any], state: Any, finished: bool) -> None:
    """Writes the log-probs into `meta` as SGLang does without the hook."""
    pairs = zip(state.output_token_logprobs_val, state.output_token_logprobs_idx, strict=True)
    meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]


def metas(request: GenerationRequest, shape: ModelShape, logprobs: list[float], **fields: Any) -> list[dict[str, Any]]:
    """Returns the `meta_info` that the client reads from a packed answer, and from the same answer in JSON."""
    asked = request_of()
    sglang.take_dtype(asked, Reader("", shape).dtype.name)
    meta = {"id": "1", "finish_reason": {"type": "stop"}, "weight_version": "7", "cached_tokens": 3, **fields}
    if request.restricted:
        meta["output_token_sampling_mask"] = [list(range(1000, 1001 + index)) for index in range(len(logprobs))]
        meta["output_token_sampling_logprobs"] = [logprob / 2 for logprob in logprobs]
    found = []
    for hook in (True, False):
        out = dict(meta)
        if request.routed_experts:
            rows = len(request.token_ids) + len(logprobs) - 1
            routes = np.arange(rows * shape.layers * shape.top_k, dtype=np.int32).reshape(rows, 3, 2) % shape.experts
            req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))
            req.routed_experts = torch.from_numpy(routes)
            if hook:
                req.sampling_params.custom_params = asked.sampling_params["custom_params"]
            sglang.narrow_experts(None, None, req)
            out["routed_experts"] = base64.b64encode(req.routed_experts.numpy().tobytes()).decode()
        if hook:
            sglang.keep_columns(plain, None, out, state_of(asked, logprobs), finished=True)
        else:
            plain(None, out, state_of(asked, logprobs), finished=True)
        body = sglang.respond(
            lambda content: SimpleNamespace(body=msgspec.json.encode(content)), {"meta_info": out}
        ).body
        assert body.startswith(b"{") != hook
        found.append(parse_body(body)["meta_info"])
    assert "id" not in found[0] and len(found[0]["token_ids"]) == 4 * len(logprobs)
    return found


def same(one: Completion, other: Completion) -> bool:
    assert (one.support is None) == (other.support is None)
    arrays = [(one.token_ids, other.token_ids), (one.logprobs, other.logprobs)]
    if one.support is not None:
        arrays += [(one.support.ids, other.support.ids), (one.support.counts, other.support.counts)]
    if one.routed_experts is not None:
        arrays.append((one.routed_experts, other.routed_experts))
    equal = [a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in arrays]
    rest = [(c.versions, c.finish_reason, c.cached_tokens, c.policy, c.temperature) for c in (one, other)]
    return all(equal) and rest[0] == rest[1]


@pytest.mark.parametrize("shape", [NARROW, WIDE], ids=["uint8", "uint16"])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}])
@pytest.mark.parametrize("routed", [False, True])
async def test_packed_columns_are_bit_for_bit_those_in_json(shape, sampling, routed) -> None:
    # Every exponent of float32, subnormal numbers included.
    bits = RANDOM.integers(0, 2**32, 4000, np.uint32).view(np.float32)
    logprobs = bits[np.isfinite(bits)].astype(float).tolist()
    request = GenerationRequest([1, 2, 3], sampling, 1, routed)
    packed, text = metas(request, shape, logprobs, weight_versions=[{"version": "7", "start": 0, "end": 4000}])
    reader = Reader("", shape)
    completion = await reader.completion(packed, request, 0.0)
    assert same(completion, await reader.completion(text, request, 0.0))
    assert len(completion.token_ids) == len(logprobs) > 3900
    assert (completion.routed_experts is not None) == routed


@pytest.mark.parametrize("count", [0, 3])
async def test_an_aborted_answer_without_routes_has_no_tokens(count: int) -> None:
    request = GenerationRequest([1, 2], {"top_k": 5}, 1, routed_experts=True)
    packed, text = metas(request, NARROW, [-1.0] * count, finish_reason={"type": "abort"})
    for meta in (packed, text):
        meta.pop("routed_experts")
        completion = await Reader("", NARROW).completion(meta, request, 0.0)
        assert len(completion.token_ids) == len(completion.logprobs) == 0 and completion.finish_reason == "abort"


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
async def test_log_probs_that_are_not_finite_are_refused(value: float) -> None:
    request = GenerationRequest([1], {}, 1)
    for meta in metas(request, NARROW, [-1.0, value]):
        with refused("answer.nan", about="url"):
            await Reader("url", NARROW).completion(meta, request, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("support_counts", None, "answer.support"),
        ("logprobs", b"\0\0\0\0", "answer.logprobs"),
        ("routed_experts", b"\0", "answer.experts"),
        ("routed_experts", None, "answer.experts"),
    ],
)
async def test_missing_columns_are_refused_by_name(name: str, value: bytes | None, code: str) -> None:
    request = GenerationRequest([1, 2], {"top_k": 5}, 1, routed_experts=True)
    packed, _ = metas(request, NARROW, [-1.0] * TOKENS)
    del packed[name]
    if value is not None:
        packed[name] = value
    with refused(code, about="url"):
        await Reader("url", NARROW).completion(packed, request, 0.0)


def test_only_requests_that_ask_get_packed_answers() -> None:
    meta: dict[str, Any] = {}
    sglang.keep_columns(plain, None, meta, state_of(request_of(), [-1.0]), finished=True)
    assert meta == {"output_token_logprobs": [(-1.0, 1000, None)]}
    stream = request_of(stream=True)
    sglang.take_dtype(stream, "uint16")
    sglang.keep_columns(plain, None, meta, state_of(stream, [-1.0]), finished=True)
    assert meta == {"output_token_logprobs": [(-1.0, 1000, None)], "packed": "uint16"}
    merged = request_of(bootstrap_room=5)
    sglang.take_dtype(merged, "uint8")
    meta = {}
    sglang.keep_columns(plain, None, meta, state_of(merged, [-1.0]), finished=True)
    assert list(meta) == ["output_token_logprobs"]
    req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=merged.sampling_params["custom_params"]))
    req.routed_experts = experts = torch.tensor([[300]], dtype=torch.int32)
    sglang.narrow_experts(None, None, req)
    assert req.routed_experts is experts
    for other in ([{"meta_info": meta}], {"text": "a"}):  # a batch of requests, and another endpoint's answer
        assert sglang.respond(lambda content: content, other) is other
    with pytest.raises(ValueError, match="packed"):
        sglang.take_dtype(request_of(), "float64")


async def test_a_client_reads_servers_with_and_without_the_plugin() -> None:
    """Both kinds may be behind one router."""
    request = GenerationRequest([1, 2], {"top_k": 5, "max_new_tokens": TOKENS}, 1, routed_experts=True)
    packed, text = metas(request, WIDE, [-0.1] * TOKENS)
    answers = [
        aiohttp.web.Response(body=msgspec.msgpack.encode({"meta_info": packed}), content_type="application/msgpack"),
        aiohttp.web.json_response({"meta_info": text, "output_ids": [1] * TOKENS, "text": "a"}),
    ]
    labels: list[dict[str, Any]] = []

    async def generate(request: aiohttp.web.Request) -> aiohttp.web.Response:
        labels.append(msgspec.json.decode((await request.json())["custom_labels"]["slimx"]))
        return answers[len(labels) - 1]

    app = aiohttp.web.Application()
    app.router.add_post("/generate", generate)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        async with GenerationClient(f"http://127.0.0.1:{runner.addresses[0][1]}", WIDE) as client:
            assert same(await client.generate(request), await client.generate(request))
    finally:
        await runner.cleanup()
    assert [label["packed"] for label in labels] == ["uint16"] * 2
