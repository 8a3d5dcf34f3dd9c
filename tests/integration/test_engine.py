"""A real SGLang server under slimx: identity, generation, publication that fails closed, router, no orphans."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from slimx.engines.server import server
from slimx.engines.server.engine import Engine, State
from slimx.engines.server.launch import CPU_VARIABLES
from slimx.engines.server.router import Router
from slimx.engines.server.spec import EngineSpec, server_env
from slimx.errors import SlimxError
from slimx.extras.served_models.client import FrozenEngine
from slimx.models.families import read_model
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from slimx.runtime.ports import free_port
from tests.integration.conftest import START_S, Bucket, Weights, perturbed, present, publish
from tests.integration.engine_oracle import PROMPT, fused, logprobs_of
from tests.refusals import numbers, refused
from tests.warm.interpreter import interpreter

pytestmark = pytest.mark.integration

SAMPLING = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def shape(tiny_model: Path) -> ModelShape:
    return ModelShape.of(read_model(tiny_model))


@pytest.fixture
def oracle(tiny_model: Path) -> Qwen3MoeForCausalLM:
    """transformers' model of the same shapes; tests load their weights into it."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def routes_of(model: Qwen3MoeForCausalLM, ids: list[int], top_k: int) -> np.ndarray:
    """Experts of every token but the last in transformers, sorted, [L - 1, layers, k]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(top_k).indices.sort().values for layer in logits], 1).numpy()


async def test_engine_attests_its_plugin_and_lists_its_tensors(engine: Engine, tiny_weights: Weights) -> None:
    (rank,) = await engine.wire.request_ranks("attest")
    assert rank["hooks"] and all(rank["hooks"].values()) and rank["cpu"] and all(rank["cpu"].values())
    assert (rank["model"], rank["dtype"], rank["device"]) == ("Qwen3MoeForCausalLM", "float32", "cpu")
    shapes = {name: f"float32:{','.join(map(str, tensor.shape))}" for name, tensor in tiny_weights.items()}
    assert await engine.inventory() == [shapes]
    (parameters,) = await engine.inventory("local")
    assert parameters["model.layers.0.mlp.experts.w13_weight"] == "float32:8,128,128"


@pytest.mark.slow("a second server")
async def test_a_stock_server_is_a_frozen_model_but_no_engine_of_the_policy(
    tiny_model: Path,
    tiny_weights: Weights,
    oracle: Qwen3MoeForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = EngineSpec("stock", str(tiny_model), "float32", "cpu", free_port(), max_total_tokens=2048)
    stock = server.EngineServer(spec, tmp_path / "server.log")
    monkeypatch.setattr(stock, "_placed", lambda: spec)
    flags = ["--attention-backend", "torch_native", "--disable-cuda-graph", "--max-total-tokens", "2048"]
    where = ["--model-path", spec.model_path, "--device", "cpu", "--dtype", "float32", "--port", str(spec.port)]
    argv = [sys.executable, str(Path(__file__).with_name("stock_server.py")), *where, *flags]
    monkeypatch.setattr(server, "server_argv", lambda spec: argv)
    monkeypatch.setattr(server, "server_env", lambda spec: server_env(spec) | CPU_VARIABLES)
    with refused("engine.unattested", about="stock"):
        await stock.launch(180)
    try:
        frozen = Engine(replace(spec, external=True, frozen=True), tmp_path / "none")
        await frozen.start(180)
        assert frozen.state is State.READY
        scored = await FrozenEngine("stock", spec.url, deadline_s=300, retries=0).logprobs(PROMPT)
        np.testing.assert_allclose(scored, logprobs_of(oracle, tiny_weights, PROMPT), atol=1e-4)
        policy = Engine(replace(spec, external=True), tmp_path / "none")
        with refused("engine.unattested", about="stock"):
            await policy.start(180)
        await frozen.stop()
        assert policy.state is State.DEAD
        assert stock.process.poll() is None, "a server of somebody else's is left alone"
    finally:
        await stock.end_processes(10)
    assert stock.process.poll() is not None


async def test_tokens_come_with_logprobs_versions_and_experts(
    engine: Engine, tiny_weights: Weights, oracle: Qwen3MoeForCausalLM, shape: ModelShape
) -> None:
    await publish(engine, tiny_weights, 4)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        completion = await client.generate(GenerationRequest(PROMPT, SAMPLING, seed=3, routed_experts=True))
        ids = [*PROMPT, *completion.token_ids.tolist()]
        scores = await client.score(ids, routed_experts=True)
    assert completion.versions == [(0, 12, 4)] and completion.finish_reason == "length" and scores.version == 4
    tempered = logprobs_of(oracle, tiny_weights, ids, SAMPLING["temperature"])[len(PROMPT) - 1 :]
    np.testing.assert_allclose(completion.logprobs, tempered, atol=1e-4)
    np.testing.assert_allclose(scores.logprobs, logprobs_of(oracle, tiny_weights, ids), atol=1e-4)
    for routed in (completion.routed_experts, scores.routed_experts):
        assert routed.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(routed), routes_of(oracle, ids, shape.top_k))


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.6}, {"top_k": 1}])
async def test_log_probs_under_top_k_and_top_p_are_over_the_kept_tokens(
    engine: Engine, tiny_weights: Weights, oracle: Qwen3MoeForCausalLM, shape: ModelShape, cut: dict
) -> None:
    weights = perturbed(tiny_weights, 5)  # far from uniform
    await publish(engine, weights, 5)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        completion = await client.generate(GenerationRequest(PROMPT, {**SAMPLING, **cut}, seed=3, routed_experts=True))
    ids = [*PROMPT, *completion.token_ids.tolist()]
    oracle.load_state_dict(fused(oracle, weights))
    with torch.no_grad():
        rows = oracle(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1] / SAMPLING["temperature"]
    kept = np.split(completion.support.ids, np.cumsum(completion.support.counts)[:-1])
    cut_away = 0.0
    for row, token, logprob, tokens in zip(rows, completion.token_ids, completion.logprobs, kept, strict=True):
        probs, order = row.softmax(-1).sort(descending=True)
        ranks = torch.arange(len(row))
        within = (probs.cumsum(0) - probs <= cut.get("top_p", 1.0)) & (ranks < cut.get("top_k", len(row)))
        assert set(tokens.tolist()) == set(order[within].tolist()) and token in tokens
        assert logprob == pytest.approx((row[token] - row[tokens.tolist()].logsumexp(0)).item(), abs=1e-5)
        cut_away = max(cut_away, 1 - probs[within].sum().item())
    assert cut_away > 0.05, "something must have been cut away"
    assert completion.routed_experts is not None


async def test_a_seed_repeats_its_tokens(engine: Engine, tiny_weights: Weights, shape: ModelShape) -> None:
    await publish(engine, tiny_weights, 1)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        runs = await asyncio.gather(
            *[client.generate(GenerationRequest(PROMPT, SAMPLING, seed)) for seed in (1, 1, 2, 1)]
        )
        alone = await client.generate(GenerationRequest(PROMPT, SAMPLING, 1))
    first, second, other, third = (run.token_ids.tolist() for run in runs)
    assert first == second == third == alone.token_ids.tolist() != other


async def test_requests_that_would_end_the_scheduler_are_refused(engine: Engine, shape: ModelShape) -> None:
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        with refused("request.sampling", about="min_p"):
            await client.generate(GenerationRequest(PROMPT, {**SAMPLING, "min_p": 0.1}, 1))
        with refused("request.token_ids", about="token id 128"):
            await client.generate(GenerationRequest([1, 128], SAMPLING, 1))
        with refused("request.token_ids"):
            await client.generate(GenerationRequest([], SAMPLING, 1))
    await engine.check_generation(30)


async def test_a_flipped_byte_is_refused_and_changes_nothing(
    engine: Engine, tiny_weights: Weights, shape: ModelShape
) -> None:
    await publish(engine, tiny_weights, 1)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        before = (await client.score(PROMPT)).logprobs
        with Bucket(perturbed(tiny_weights, 5)) as bucket:
            wrong = bucket.tensors[7]
            bucket.flip(wrong.offset + wrong.nbytes - 1)
            await engine.begin(await present(engine, 2))
            with refused("receiver.checksum", about=wrong.name):
                await engine.stage(bucket.packed, 3)
        (status,) = await engine.wire.request_ranks("status")
        assert (status["open"], status["version"], status["staged"]) == (None, 1, 0)
        assert engine.state is State.READY
        np.testing.assert_array_equal((await client.score(PROMPT)).logprobs, before)
    await engine.verify()


async def test_buckets_that_do_not_fit_the_model_are_refused_before_any_change(
    engine: Engine, tiny_weights: Weights
) -> None:
    some = dict(list(tiny_weights.items())[:3])
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    cases = [
        ("receiver.tensor", {"model.layers.9.x": torch.zeros(2)}, "bucket 0"),
        ("receiver.tensor", {name + "s": torch.zeros(2)}, f"{name}"),
        ("receiver.form", {name: tiny_weights[name].bfloat16()}, r"bfloat16:64,128\b.*\bfloat32:64,128"),
        ("receiver.form", {name: tiny_weights[name].T}, r"float32:128,64\b.*\bfloat32:64,128"),
    ]
    for code, weights, values in cases:
        await engine.begin(await present(engine, 1))
        with Bucket(some | weights) as bucket, refused(code, about=next(iter(weights))) as caught:
            await engine.stage(bucket.packed, 0)
        assert re.search(values, str(caught.value).partition(next(iter(weights)))[2]), caught.value
    await engine.begin(await present(engine, 1))
    with Bucket(some) as bucket:
        await engine.stage(bucket.packed, 0)
        with refused("receiver.twice", about=next(iter(some))):
            await engine.stage(bucket.packed, 1)
        with refused("engine.not_open", about="stage"):
            await engine.stage(bucket.packed, 2)
        await engine.begin(await present(engine, 1))
        await engine.stage(bucket.packed, 0)
        await engine.pause()
        with refused("engine.not_staged") as caught:
            await engine.load()
        assert caught.value.about in tiny_weights and 66 in numbers(caught.value)
        assert engine.state is State.PAUSED
        await engine.abort()
        await engine.abort()
        await engine.resume()
    await engine.begin(await present(engine, 1))
    with pytest.raises(SlimxError) as error:
        await engine.stage(bucket.packed, 0)
    assert error.value.code in ("bucket.gone", "bucket.foreign"), "closed, and perhaps another file has its number"


async def test_a_publication_gives_the_new_models_logprobs(
    engine: Engine, tiny_weights: Weights, oracle: Qwen3MoeForCausalLM, shape: ModelShape
) -> None:
    new = perturbed(tiny_weights, 11)
    await publish(engine, tiny_weights, 7)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        old = await client.score(PROMPT)
        await publish(engine, new, 8, staging="bucket")
        scores = await client.score(PROMPT)
    assert (old.version, scores.version, engine.versions) == (7, 8, {"actor": 8})
    np.testing.assert_allclose(scores.logprobs, logprobs_of(oracle, new, PROMPT), atol=1e-4)
    assert np.abs(scores.logprobs - old.logprobs).max() > 0.1
    assert (await engine.verify())["checked"] == len(new)


async def test_verify_names_a_tensor_changed_behind_its_back(
    engine: Engine, tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    await publish(engine, tiny_weights, 1)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    changed = {n: w.clone() for n, w in tiny_weights.items()}
    changed[name][3, 4] += 1e-3
    save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    await engine.wire.call("/update_weights_from_disk", {"model_path": str(tmp_path)})
    with refused("engine.unverified", about=name):
        await engine.verify()
    await publish(engine, tiny_weights, 2)


async def test_tokens_across_a_publication_carry_both_versions(
    engine: Engine, tiny_weights: Weights, shape: ModelShape
) -> None:
    sampling = {**SAMPLING, "max_new_tokens": 400}
    request = GenerationRequest(PROMPT, sampling, 1, routed_experts=True)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        for wait_s in (0.5, 0.2, 1, 2, 4):  # a busy machine begins late, a quick one ends early
            await publish(engine, tiny_weights, 20)
            running = asyncio.create_task(client.generate(request))
            await asyncio.sleep(wait_s)
            await publish(engine, perturbed(tiny_weights, 2), 21)
            completion = await running
            if len(completion.versions) == 2:
                break
    (_, stop, first), (start, end, second) = completion.versions
    assert (first, second, end) == (20, 21, 400) and 0 < start == stop < 400
    assert len(completion.routed_experts) == len(PROMPT) + 400 - 1


async def test_aborted_requests_return_what_they_have(engine: Engine, tiny_weights: Weights, shape: ModelShape) -> None:
    await publish(engine, tiny_weights, 1)
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        running = asyncio.create_task(
            client.generate(GenerationRequest(PROMPT, {**SAMPLING, "max_new_tokens": 1500}, 1))
        )
        await asyncio.sleep(0.5)
        await engine.interrupt()
        completion = await running
    assert completion.finish_reason == "abort" and 0 < len(completion.token_ids) < 1500


async def test_sleep_and_wake_end_in_a_verified_engine(
    engine: Engine, tiny_weights: Weights, shape: ModelShape
) -> None:
    await engine.pause()
    await engine.sleep()
    with refused("engine.state", about="resume"):
        await engine.resume()
    await engine.wake(("weights",))
    assert engine.state is State.DIRTY
    await engine.begin(await present(engine, 30))
    with Bucket(tiny_weights) as bucket:
        await engine.stage(bucket.packed, 0)
        await engine.load()
    await engine.verify()
    await engine.commit(30)
    assert engine.asleep == {"kv_cache", "cuda_graph"}
    await engine.resume()
    assert engine.state is State.READY and not engine.asleep
    async with GenerationClient(engine.spec.url, shape, api_key=engine.spec.keys.api_key) as client:
        assert (await client.generate(GenerationRequest(PROMPT, SAMPLING, 1))).versions == [(0, 12, 30)]


async def test_a_paused_scheduler_waits_for_messages(engine: Engine) -> None:
    await engine.pause()
    (rank,) = await engine.wire.request_ranks("attest")
    scheduler = psutil.Process(rank["pid"])
    began = sum(scheduler.cpu_times()[:2])
    await asyncio.sleep(3)
    assert sum(scheduler.cpu_times()[:2]) - began < 1, "seconds of a core; polling would take all three"
    await engine.resume()
    assert engine.state is State.READY


async def test_the_router_sends_to_registered_engines_only(
    engine: Engine, tiny_weights: Weights, shape: ModelShape, tmp_path: Path
) -> None:
    await publish(engine, tiny_weights, 1)
    router = Router(free_port(), free_port(), tmp_path / "router.log", keys=engine.spec.keys)
    router.start()
    try:
        await router.wait_ready(30)
        async with GenerationClient(router.url, shape, retry_s=0.5, api_key=router.keys.api_key) as client:
            with refused("request.refused", about=f"{router.url}/generate") as caught:
                await client.generate(GenerationRequest(PROMPT, SAMPLING, 1))
            assert caught.value.status == 503
            await engine.pause()  # a router takes an engine in whether it can generate or not
            await router.add(engine.spec.url)
            await engine.resume()
            completion = await client.generate(GenerationRequest(PROMPT, {**SAMPLING, "top_k": 5}, 1, True))
            assert completion.routed_experts is not None and completion.support is not None
            # A request in flight survives the removal of its worker.
            running = asyncio.create_task(
                client.generate(GenerationRequest(PROMPT, {**SAMPLING, "max_new_tokens": 200}, 1))
            )
            await asyncio.sleep(0.2)
            await router.remove(engine.spec.url)
            assert len((await running).token_ids) == 200
            with refused("request.refused", about=f"{router.url}/generate") as caught:
                await client.generate(GenerationRequest(PROMPT, SAMPLING, 1))
            assert caught.value.status == 503
    finally:
        await router.stop()


OWNER = """
import asyncio, sys
from pathlib import Path
from pytest import MonkeyPatch
from slimx.engines.server.engine import Engine
from slimx.engines.server.spec import EngineSpec
from tests.warm import guards
guards.install(MonkeyPatch(), Path(sys.argv[3]))
engine = Engine(EngineSpec("orphan", sys.argv[1], "float32", "cpu", max_total_tokens=1024), Path(sys.argv[2]))
async def start():
    starting = asyncio.create_task(engine.start(600))
    while engine.process is None:
        await asyncio.sleep(0.01)
    print(engine.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(start())
"""


def test_a_killed_owner_leaves_no_server_process(tiny_model: Path, tmp_path: Path) -> None:
    """SIGKILL while the server is starting its children: the moment in which SGLang alone would leave orphans."""
    log = tmp_path / "server.log"
    arguments = map(str, (tiny_model, log, interpreter().parent))
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    tree: list[psutil.Process] = []
    try:
        guard = psutil.Process(int(owner.stdout.readline()))
        deadline = time.monotonic() + START_S
        while len(tree) < 4:  # guard, server, scheduler, detokenizer
            assert time.monotonic() < deadline and guard.is_running(), log.read_text()[-2000:]
            time.sleep(0.2)
            tree = [guard, *guard.children(recursive=True)]
        owner.send_signal(signal.SIGKILL)
        owner.wait(120)
        _, alive = psutil.wait_procs(tree, timeout=300)
        assert not alive
    finally:
        owner.kill()
        for process in tree:
            if process.is_running():
                process.kill()
