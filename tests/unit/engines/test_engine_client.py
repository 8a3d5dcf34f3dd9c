"""The generation client and the control client against servers that answer what a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp.web
import pytest

from slimx.engines.server.engine import Engine, State
from slimx.engines.server.http_calls import ControlClient
from slimx.engines.server.spec import EngineSpec
from slimx.layout.ranks import EngineSizes
from slimx.reshard.manifest import Manifest
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.rollout.client.sending import UNREACHED, AnswerError
from tests.refusals import refused


async def serve(answers: list[tuple[int, dict]]):
    """Starts a fake server that gives `answers` in turn, then the last one for ever; returns (runner, url, bodies)."""
    bodies: list[dict] = []

    async def generate(request: aiohttp.web.Request) -> aiohttp.web.Response:
        bodies.append(await request.json())
        status, answer = answers[min(len(bodies), len(answers)) - 1]
        return aiohttp.web.json_response(answer, status=status)

    app = aiohttp.web.Application()
    app.router.add_post("/generate", generate)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}", bodies


def meta(**change: object) -> dict:
    info = {"output_token_logprobs": [[-1.5, 4, None], [-0.5, 3, None]], "finish_reason": {"type": "stop"}}
    info |= {"weight_version": "6", "cached_tokens": 0, "input_token_logprobs": []}
    return {"meta_info": info | change}


async def test_versions_fall_back_to_one_span_and_must_be_numbers() -> None:
    spans = [{"version": "5", "start": 0, "end": 1}, {"version": "6", "start": 1, "end": 2}]
    runner, url, bodies = await serve(
        [(200, meta()), (200, meta(weight_versions=spans)), (200, meta(weight_version="default"))]
    )
    try:
        async with GenerationClient(url, ModelShape(10)) as client:
            first = await client.generate(GenerationRequest([1], {"max_new_tokens": 2}, seed=9))
            assert (
                first.versions == [(0, 2, 6)] and first.token_ids.tolist() == [4, 3] and first.finish_reason == "stop"
            )
            assert (await client.generate(GenerationRequest([1], {}, seed=9))).versions == [(0, 1, 5), (1, 2, 6)]
            with refused("answer.version", about=url):
                await client.generate(GenerationRequest([1], {}, seed=9))
        assert bodies[0]["sampling_params"] == {"max_new_tokens": 2, "sampling_seed": 9}
    finally:
        await runner.cleanup()


async def test_a_client_names_its_adapters_and_reads_their_version() -> None:
    stamps = ("actor=1,judge=5", "actor=2,judge=5", "actor=2,judge=6")
    spans = [{"version": text, "start": number, "end": number + 1} for number, text in enumerate(stamps)]
    tokens = [[-1.5, 4, None], [-0.5, 3, None], [-0.5, 2, None]]
    scored = meta(weight_version=stamps[2], output_token_logprobs=[], input_token_logprobs=[[None, 1, None]])
    runner, url, bodies = await serve(
        [
            (200, meta(weight_versions=spans, output_token_logprobs=tokens)),
            (200, scored),
            (200, meta(weight_version="actor=1")),
        ]
    )
    try:
        async with GenerationClient(url, ModelShape(10), adapters="judge") as client:
            request = GenerationRequest([1], {}, seed=9, policy="judge")
            # That the actor's changed in between is not a change of the judge's.
            assert (await client.generate(request)).versions == [(0, 2, 5), (2, 3, 6)]
            assert (await client.score([1])).version == 6
            with refused("answer.version", about=url):
                await client.generate(request)
        labels = [json.loads(body["custom_labels"]["slimx"]) for body in bodies]
        assert {label["lora_id"] for label in labels} == {"judge"} and len(labels) == 3
    finally:
        await runner.cleanup()


async def test_log_probs_that_are_nan_are_refused_in_the_engines_name() -> None:
    sampled = meta(output_token_logprobs=[[-1.5, 4, None], [None, 3, None]])
    scored = meta(output_token_logprobs=[], input_token_logprobs=[[None, 1, None], [None, 2, None]])
    runner, url, _ = await serve([(200, sampled), (200, scored)])
    try:
        async with GenerationClient(url, ModelShape(10)) as client:
            with refused("answer.nan", about=url):
                await client.generate(GenerationRequest([1], {}, seed=9))
            with refused("answer.nan", about=url):
                await client.score([1, 2])
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("ids", "wrong"), [([0, 9, 10], "token id 10"), ([0, -1], "token id -1")])
async def test_a_prompt_beyond_the_vocabulary_is_refused_by_token(ids: list[int], wrong: str) -> None:
    async with GenerationClient("http://127.0.0.1:9", ModelShape(10)) as client:
        with refused("request.token_ids", about=wrong):
            await client.generate(GenerationRequest(ids, {}, seed=9))


async def test_no_routes_are_requested_from_a_dense_model() -> None:
    scored = meta(input_token_logprobs=[[None, 1, None], [-0.5, 2, None]], output_token_logprobs=[])
    runner, url, bodies = await serve([(200, meta()), (200, scored)])
    try:
        async with GenerationClient(url, ModelShape(10, layers=2)) as client:
            assert (
                await client.generate(GenerationRequest([1], {}, seed=9, routed_experts=True))
            ).routed_experts is None
            assert (await client.score([1, 2], routed_experts=True)).routed_experts is None
        assert not any("return_routed_experts" in body for body in bodies)
    finally:
        await runner.cleanup()


async def test_lost_requests_are_sent_again_and_mistakes_are_not() -> None:
    lost = (500, {"error": {"code": "call_upstream_request_error", "message": "error sending request"}})
    runner, url, bodies = await serve([lost, (503, {}), (200, meta()), (400, {"error": {"message": "too long"}})])
    try:
        async with GenerationClient(url, ModelShape(10)) as client:
            assert (await client.generate(GenerationRequest([1], {}, seed=1))).versions and len(bodies) == 3
            with refused("request.refused", about=f"{url}/generate", kind=AnswerError) as caught:
                await client.generate(GenerationRequest([1], {}, seed=1))
            assert (caught.value.status, caught.value.message) == (400, "too long")
            assert len(bodies) == 4
    finally:
        await runner.cleanup()
    async with GenerationClient(url, ModelShape(10), retry_s=0.2) as client:
        with refused("request.refused", kind=AnswerError) as caught:
            await client.generate(GenerationRequest([1], {}, seed=1))
        assert caught.value.status == UNREACHED and "ClientConnectorError" in caught.value.message


async def test_the_support_is_requested_if_truncated_and_must_cover_tokens() -> None:
    kept = {"output_token_sampling_mask": [[4, 7], [3]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    runner, url, bodies = await serve([(200, meta(**kept)), (200, meta(**kept)), (200, meta())])
    try:
        async with GenerationClient(url, ModelShape(10)) as client:
            for number, cut in enumerate(({"top_k": 5}, {"top_p": 0.9, "temperature": 0.7})):
                completion = await client.generate(GenerationRequest([1], cut, seed=1))
                assert completion.support.counts.tolist() == [2, 1] and completion.support.ids.tolist() == [4, 7, 3]
                assert completion.logprobs.tolist() == [-0.25, 0.0]
                labels = json.loads(bodies[number]["custom_labels"]["slimx"])
                assert labels == {"packed": "uint8", "return_sampling_mask": True}
            # SGLang reports a bounded number only: under top-p alone the whole small vocabulary.
            assert [body["sampling_params"]["top_k"] for body in bodies] == [5, 10]
            for whole in ({}, {"top_k": -1, "top_p": 1.0}, {"top_k": 5, "top_p": 0.5, "temperature": 0.0}):
                completion = await client.generate(GenerationRequest([1], whole, seed=1))
                assert completion.support is None and completion.logprobs.tolist() == [-1.5, -0.5]
                assert "return_sampling_mask" not in bodies[-1]["custom_labels"]["slimx"]
            with refused("answer.support", about=url):
                await client.generate(GenerationRequest([1], {"top_k": 5}, seed=1))
    finally:
        await runner.cleanup()


# Several ranks --------------------------------------------------------------------------------------------------------

Answer = Callable[[str, dict[str, Any], int], dict[str, Any]]
"""Answer of a rank to an action with its argument: a JSON object, or a SlimxError's "error", "code" and "about"."""

NO_ROOM = {"error": "no room", "code": "receiver.memory", "about": "w"}


@asynccontextmanager
async def ranks(answer: Answer, places: list[tuple[int, int]]) -> AsyncIterator[tuple[str, list[str]]]:
    """Runs a server whose /weights_checker answers for `places`, (rank, process id) each; yields (URL, requests)."""
    requests: list[str] = []

    async def check(request: aiohttp.web.Request) -> aiohttp.web.Response:
        body = await request.json()
        requests.append(body["action"].removeprefix("slimx."))
        out = []
        for rank, pid in places:
            reply = answer(requests[-1], json.loads(body["skip_tensor_list"][0]), rank)
            sums = reply if "error" in reply else {"slimx": json.dumps(reply)}
            place = {"role": "target", "rank": rank, "size": 2}
            out.append({"checksums": sums | {"pid": str(pid)}, "parallelism_info": [place]})
        return aiohttp.web.json_response({"success": True, "ranks": out})

    async def other(request: aiohttp.web.Request) -> aiohttp.web.Response:
        requests.append(request.path)
        if request.path == "/update_weights_from_tensor":
            assert len((await request.json())["serialized_named_tensors"]) == 2
        return aiohttp.web.json_response({"success": True})

    app = aiohttp.web.Application()
    app.router.add_post("/weights_checker", check)
    app.router.add_post("/{path}", other)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", requests
    finally:
        await runner.cleanup()


def engine_at(url: str, tmp_path: Path, state: State = State.PAUSED) -> Engine:
    """Makes an engine of two ranks whose server is the one at `url`."""
    port = int(url.rpartition(":")[2])
    spec = EngineSpec("e", "/m", "float32", "cpu", port, sizes=EngineSizes(tensor=2), external=True)
    engine = Engine(spec, tmp_path / "log")
    engine.state = state
    return engine


async def test_every_rank_answers_once_in_order() -> None:
    # With DP-attention each scheduler brings the answers of all ranks.
    async with ranks(lambda action, _, rank: {"of": rank}, [(1, 11), (0, 10), (1, 11), (0, 10)]) as (url, _):
        assert await ControlClient(url).request_ranks("status") == [{"of": 0}, {"of": 1}]


async def test_indistinguishable_or_unresponsive_ranks_are_refused() -> None:
    for places, code in (
        ([(0, 10), (1, 11), (0, 12), (1, 13)], "engine.replicas"),
        ([(0, 10)], "engine.ranks_missing"),
        ([], "engine.no_plugin"),
    ):
        async with ranks(lambda *_: {}, places) as (url, _):
            with refused(code, about="engine"):
                await ControlClient(url).request_ranks("status")


async def test_an_error_names_its_rank() -> None:
    async with ranks(lambda action, _, rank: NO_ROOM if rank else {}, [(0, 10), (1, 11)]) as (url, _):
        with refused(NO_ROOM["code"], about=NO_ROOM["about"]):
            await ControlClient(url, "e").request_ranks("status")


async def test_inventories_are_one_list_of_names_or_one_of_parameters_per_rank(tmp_path: Path) -> None:
    def answer(action: str, argument: dict, rank: int) -> dict:
        hf = {"norm": "float32:4", f"expert.{rank}": "float32:2,2"}
        forms = hf if argument["encoding"] == "hf" else {"w": f"float32:{rank}"}
        return {"forms": forms, "uncovered": {}} | spoilt.get(rank, {})

    spoilt: dict[int, dict] = {}
    async with ranks(answer, [(0, 10), (1, 11)]) as (url, _):
        engine = engine_at(url, tmp_path)
        assert await engine.inventory("local") == [{"w": "float32:0"}, {"w": "float32:1"}]
        union = {"norm": "float32:4", "expert.0": "float32:2,2", "expert.1": "float32:2,2"}
        assert await engine.inventory() == [union]
        spoilt[1] = {"forms": {"norm": "float32:5"}}
        with refused("engine.ranks_differ", about="norm"):
            await engine.inventory()
        assert len(await engine.inventory("local")) == 2
        spoilt[1] = {"uncovered": {"adapter": "no row"}}
        with refused("engine.uncovered", about="adapter"):
            await engine.inventory("hf")


TENSOR = PackedTensor("w", "float32", (1,), 0, 4, 7)


def manifest(encoding: str) -> Manifest:
    return Manifest(policy="actor", version=3, encoding=encoding, trainer_step=1, membership_epoch=2)


async def test_local_buckets_list_the_tensors_of_each_rank(tmp_path: Path) -> None:
    seen: list[dict] = []

    def answer(action: str, argument: dict, rank: int) -> dict:
        if action == "stage" and rank == 0:
            seen.append(argument)
        return {}

    async with ranks(answer, [(0, 10), (1, 11)]) as (url, _):
        engine = engine_at(url, tmp_path)
        for encoding, targets, bucket in (("local", ((), (TENSOR,)), 5), ("hf", ((TENSOR,),), 6)):
            await engine.begin(manifest(encoding))
            await engine.stage(PackedBucket("/m", 4, targets), bucket)
    part = {"fd_path": "/m", "size": 4, "tensors": [TENSOR.to_json()]}
    parts = {"0": part | {"tensors": []}, "1": part}
    assert seen == [
        {"policy": "actor", "version": 3, "epoch": 2, "bucket": 5, "ranks": parts},
        {"policy": "actor", "version": 3, "epoch": 2, "bucket": 6, "ranks": {"all": part}},
    ]


async def test_ranks_verify_together(tmp_path: Path) -> None:
    found: list[dict] = []
    answer = {"encoding": "hf", "tensors": 4, "differ": [], "missing": [], "derived": ["w_kc"]}
    async with ranks(lambda action, argument, rank: answer | found[rank], [(0, 10), (1, 11)]) as (url, _):
        for changes, checked in (({}, 4), ({"encoding": "local"}, 8)):
            found[:] = [changes, changes]
            engine = engine_at(url, tmp_path, State.DIRTY)
            assert await engine.verify() == {"checked": checked, "derived": ["w_kc"]}
            assert engine.state is State.PAUSED
        for wrong, code, about in (
            ([{"differ": ["b"]}, {"differ": ["a", "b"], "missing": ["c"]}], "engine.unverified", "a"),
            ([{}, {"missing": ["c"]}], "engine.unverified", "c"),
            ([{}, {"tensors": 5}], "engine.counts", "e"),
        ):
            found[:] = wrong
            engine = engine_at(url, tmp_path, State.DIRTY)
            with refused(code, about=about):
                await engine.verify()
            assert engine.state is State.DIRTY


@pytest.mark.parametrize(
    ("failing", "code", "about"), [("stage", NO_ROOM["code"], NO_ROOM["about"]), ("load", "engine.copy", "e")]
)
async def test_a_rank_that_fails_ends_the_publication_on_all(
    failing: str, code: str, about: str, tmp_path: Path
) -> None:
    def answer(action: str, argument: dict, rank: int) -> dict:
        if action == "stage" == failing and rank:
            return NO_ROOM
        text = {"error": "no room"} if failing == "load" and rank else {}
        return {"missing": 0, "outcome": {"loaded": 1} | text}

    async with ranks(answer, [(0, 10), (1, 11)]) as (url, requests):
        engine = engine_at(url, tmp_path)
        with refused("engine.not_open", about="stage"):
            await engine.stage(PackedBucket("/m", 4, ((TENSOR,),)), 0)
        await engine.begin(manifest("hf"))
        with refused(code, about=about):
            await engine.stage(PackedBucket("/m", 4, ((TENSOR,),)), 0)
            await engine.load()
        assert requests[-1] == "abort" and engine.publication is None
        assert engine.state is (State.DIRTY if failing == "load" else State.PAUSED)


async def test_weights_are_updated_in_one_session_per_publication(tmp_path: Path) -> None:
    verified = {"encoding": "hf", "tensors": 1, "differ": [], "missing": [], "derived": []}
    async with ranks(lambda *_: {"outcome": {}} | verified, [(0, 10), (1, 11)]) as (url, requests):
        engine = engine_at(url, tmp_path)
        await engine.begin(manifest("hf"), "bucket")
        for number in range(2):
            await engine.stage(PackedBucket("/m", 4, ((TENSOR,),)), number)
            await engine.load()
        assert (await engine.verify())["checked"] == 1 and engine.state is State.PAUSED
        await engine.commit(3)
    update = ["stage", "/update_weights_from_tensor", "status"]
    first = ["begin", "stage", "/begin_weight_update", *update[1:]]
    last = ["/end_weight_update", "verify", "commit", "/flush_cache", "/update_weight_version"]
    assert requests == [*first, *update, *last] and engine.versions == {"actor": 3}
