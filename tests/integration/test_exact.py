"""Exact mode: log-probs of the real server and of the real trainer are equal to the last bit, token by token; also with
weights in blocks of fp8, of which the server holds codes and which trainers round alike."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.engines.server.engine import Engine
from slimx.engines.server.keys import bearer
from slimx.engines.server.spec import EngineSpec
from slimx.extras.exact.mode import Exact
from slimx.layout.ranks import EngineSizes
from slimx.models.families import read_model
from slimx.numerics.mode import NumericsMode
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from tests.integration import block_models
from tests.integration.block_models import in_fp8, make_block_deepseek, make_block_model
from tests.integration.conftest import ROOT, START_S, Weights, perturbed, publish
from tests.integration.exact_runs import DENSE, ONE, TWO, assert_none, cases_of, gaps, make_models
from tests.integration.runs import TrainProcess, steps, write_config
from tests.refusals import numbers

pytestmark = pytest.mark.integration

BLOCKS = {
    "qwen3_moe": make_block_model,
    "qwen3": partial(make_block_model, dense=True),
    "deepseek_v3": make_block_deepseek,
}
Completions = list[dict[str, Any]]
Published = Callable[[Engine, Path], Awaitable[Weights | list[Weights]]]
"""Returns what is published to an engine of a directory's weights: whole tensors, or those of each rank."""


def check_run(run: TrainProcess, directory: Path) -> None:
    """Checks that a run of three steps learns, verifies every publication and never has a gap."""
    assert run.wait() == 0, run.text()
    rows = steps(directory)
    assert list(rows) == [1, 2, 3]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["gap/max"] == 0.0 and row["mismatch/max"] == 0.0
        assert row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1


@pytest.mark.slow("a whole run; test_run_deepseek has one in exact mode")
def test_quickstart_runs_in_exact_mode_without_any_gap(tiny_model: Path, task_of_sums: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        numerics={"mode": "exact"},
        # The pass over the old policy, which an exact run leaves out.
        algorithm={"old_logprobs": "recompute"},
        schedule={"steps": 3},
        checkpoint={"export_hf": False},
    )
    run = TrainProcess(config)
    check_run(run, tmp_path / "run")


@pytest.mark.slow("a trainer and a server in each mode")
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_doctor_says_how_large_the_gap_is_and_where_it_begins(
    mode: str, tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_model, task_of_sums / "train.jsonl", numerics={"mode": mode})
    command = [sys.executable, "-m", "slimx.cli", "doctor", str(config), "--gap", "--layers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    gap = float(re.search(r"largest (\S+)", done.stdout)[1])
    if mode == "exact":
        assert gap == 0.0 and "first difference" not in done.stdout
    else:
        (line,) = (line for line in done.stdout.splitlines() if "first difference" in line)
        assert 0 < gap < 1e-4 and numbers(line), "tokens that differ"


def server(model: Path, dtype: str, leaves: int, sizes: EngineSizes, log: Path, *, threads: int = 1) -> Engine:
    """Its prompts are computed in chunks of 64 tokens, its radix cache is on."""
    spec = EngineSpec(
        "exact",
        str(model),
        dtype,
        "cpu",
        max_total_tokens=8192,
        threads=threads,
        sizes=sizes,
        numerics=NumericsMode() if leaves is None else Exact(leaves),
        routed_experts=read_model(model).experts > 0,
        sglang={"chunked_prefill_size": 64},
    )
    return Engine(spec, log)


def changed(model: Path, out: Path) -> Path:
    """A copy of `model` with other weights."""
    shutil.copytree(model, out)
    save_file(perturbed(load_file(model / "model.safetensors"), 7), out / "model.safetensors", {"format": "pt"})
    return out


async def before_and_after(engine: Engine, first: Path, second: Path, published: Published) -> dict[str, Completions]:
    """Completions under the weights of `first`, and of `second` after they are published; by directory."""
    found = {}
    try:
        await engine.start(START_S)
        for version, model in enumerate((first, second), 1):
            await publish(engine, await published(engine, model), version)
            found[str(model)] = await completions(engine, model)
    finally:
        await engine.stop()
    return found


async def whole(engine: Engine, model: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors that a publication of the checkpoint `model` sends, by Hugging Face name."""
    weights, forms = load_file(model / "model.safetensors"), (await engine.inventory())[0]
    return {name: _published(weights[name], form, engine.spec.dtype) for name, form in forms.items()}


def _published(weight: torch.Tensor, form: str, dtype: str) -> torch.Tensor:
    """As a trainer of `dtype` has it, which keeps the routers' biases only in fp32, in the engine's own dtype (of
    "dtype:shape")."""
    rounded = weight if weight.dim() == 1 and form.startswith("float32") else weight.to(getattr(torch, dtype))
    return rounded.to(getattr(torch, form.partition(":")[0]))


async def completions(engine: Engine, model: Path) -> Completions:
    random, out = np.random.default_rng(5), []

    async def sample(client: GenerationClient, prompt: list[int], temperature: float, cached: int = 0) -> None:
        sampling = {"temperature": temperature, "max_new_tokens": 6, "ignore_eos": True}
        done = await client.generate(GenerationRequest(prompt, sampling, seed=len(out)))
        assert done.cached_tokens >= cached
        one = {"tokens": done.token_ids.tolist(), "logprobs": done.logprobs.tolist()}
        out.append({"prompt": prompt, "temperature": temperature, **one})

    def prompt(length: int) -> list[int]:
        return random.integers(4, 100, length).tolist()

    async with GenerationClient(
        engine.spec.url, ModelShape.of(read_model(model)), api_key=engine.spec.keys.api_key
    ) as client:
        shared = prompt(20)
        await sample(client, shared, 1.0)  # alone
        await sample(client, [*shared, *prompt(3)], 0.7, cached=20)  # behind the prefix that the first one left
        # Sixteen together: short ones, cached prefixes, and prompts of several chunks among running decodes.
        batch = [prompt(n) for n in range(2, 12)] + [[*shared, *prompt(n)] for n in (2, 5, 9, 13)]
        batch += [prompt(150), prompt(90)]
        await asyncio.gather(*(sample(client, p, (1.0, 0.7)[i % 2]) for i, p in enumerate(batch)))
        return out + await retracted(engine, client, [prompt(6) for _ in range(3)])


async def retracted(engine: Engine, client: GenerationClient, prompts: list[list[int]]) -> Completions:
    """Returns the completions of requests that a pause removes from the batch, whose KV cache is computed again.

    Requests become longer until a pause removes one."""
    longest, end = 24, time.monotonic() + START_S
    while time.monotonic() < end:
        async with aiohttp.ClientSession(engine.spec.url, headers=bearer(engine.spec.keys.api_key)) as session:
            requests = [
                asyncio.ensure_future(complete(session, prompt, number, longest))
                for number, prompt in enumerate(prompts)
            ]
            sampling = {"temperature": 1.0, "max_new_tokens": longest, "ignore_eos": True}
            async with client.stream(GenerationRequest(prompts[0], sampling, seed=99)) as stream:
                await anext(aiter(stream))  # the others came before it, and run as well
                await engine.pause("retract")
                await engine.resume()
            found = await asyncio.gather(*requests)
        if any(times for _, times in found):
            return [one for one, _ in found]
        longest *= 2
    raise AssertionError("no pause came while a request ran")


async def complete(
    session: aiohttp.ClientSession, prompt: list[int], seed: int, tokens: int
) -> tuple[dict[str, Any], int]:
    """A completion, and how often it was retracted."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": seed}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with session.post("/generate", json=body) as answer:
        meta = (await answer.json())["meta_info"]
    logprobs, ids = zip(*((logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]), strict=True)
    one = {"prompt": prompt, "temperature": 1.0, "tokens": list(ids), "logprobs": list(logprobs)}
    return one, meta["num_retractions"]


def sampled_by(engine: Engine, first: Path, second: Path, published: Published = whole) -> dict[str, Completions]:
    return asyncio.run(before_and_after(engine, first, second, published))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tiny_model)


@pytest.mark.slow("full grid of models")
@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("moe", "bfloat16", {}),
        ("moe", "float32", {"tensor": 2}),
        ("moe", "bfloat16", {"tensor": 2, "expert": 2}),
        ("qwen3", "bfloat16", {"tensor": 2}),
        ("qwen3", "float32", {}),
        ("qwen2", "float32", {}),
        ("llama", "bfloat16", {}),
        ("deepseek", "float32", {}),
        ("deepseek", "bfloat16", {"tensor": 2, "expert": 2}),
        ("direct", "float32", {"tensor": 2}),
        ("glm4_moe", "bfloat16", {"tensor": 2}),
    ],
)
def test_server_and_trainers_of_every_layout_agree_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, name: str, dtype: str, sizes: dict[str, int]
) -> None:
    other = changed(models[name], tmp_path / "other")
    engine = server(models[name], dtype, 2, EngineSizes(**sizes), tmp_path / "server.log")
    sampled = sampled_by(engine, models[name], other)
    cases = cases_of(name, DENSE if name in ("qwen3", "qwen2", "llama") else TWO)
    groups = [{"model": model, "dtype": dtype, "completions": done, "cases": cases} for model, done in sampled.items()]
    stale = {"model": groups[0]["model"], "completions": groups[1]["completions"], "cases": [cases[0]], "dtype": dtype}
    *found, [seen] = gaps(tmp_path / "ranks", [*groups, stale])
    assert_none(groups, found)
    assert seen["gap/max"] > 0, "weights of another version must show"


@pytest.mark.slow("servers and trainers of four ranks")
@pytest.mark.parametrize(("name", "dtype"), [("moe", "bfloat16"), ("deepseek", "float32")])
def test_a_server_and_trainers_of_four_ranks_and_more_threads_agree(
    models: dict[str, Path], tmp_path: Path, name: str, dtype: str
) -> None:
    other = changed(models[name], tmp_path / "other")
    engine = server(models[name], dtype, 4, EngineSizes(), tmp_path / "server.log", threads=2)
    sampled = sampled_by(engine, models[name], other)
    cases: list[dict[str, Any]] = [
        {"trainer": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 2}},
        {"trainer": {"world_size": 4, "tensor": 2, "expert": 2, "expert_tensor": 1}},
        {"trainer": {"world_size": 2, "tensor": 2, "max_tokens_per_microbatch": 60}, "threads": 2},
        {**ONE, "threads": 2},
    ]
    if name == "deepseek":  # the other has two groups of heads
        cases.append({"trainer": {"world_size": 4, "tensor": 4}})
    cases = [{"leaves": 4, **case} for case in cases]
    groups = [{"model": model, "dtype": dtype, "completions": done, "cases": cases} for model, done in sampled.items()]
    stale = {"model": groups[0]["model"], "completions": groups[1]["completions"], "cases": [cases[0]], "dtype": dtype}
    *found, [seen] = gaps(tmp_path / "ranks", [*groups, stale], world=4)
    assert_none(groups, found)
    assert seen["gap/max"] > 0, "weights of another version must show"


async def in_blocks(engine: Engine, model: Path) -> list[Weights]:
    return block_models.published(model, engine.spec.sizes)


@pytest.mark.slow("full grid of models and layouts, two whole runs")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"tensor": 2, "expert": 2}),
        ("qwen3_moe", {"tensor": 2}),
        ("qwen3", {"tensor": 2}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"tensor": 2, "expert": 2}),
    ],
)
def test_fp8_server_and_trainers_of_every_layout_agree_bit_for_bit(
    tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    first = BLOCKS[name](tmp_path / "first")
    second = changed(first, tmp_path / "second")
    fp8 = in_fp8(first, tmp_path / "fp8")
    engine = server(fp8, "bfloat16", 2, EngineSizes(**sizes), tmp_path / "server.log")
    sampled = sampled_by(engine, first, second, in_blocks)
    cases = [{"leaves": 2, **case} for case in [ONE, *(DENSE if name == "qwen3" else TWO)]]
    groups: list[dict[str, Any]] = [
        {"model": model, "dtype": "bfloat16", "completions": done, "cases": cases, "quantize": "ieee"}
        for model, done in sampled.items()
    ]
    others = [
        groups[0] | {"completions": groups[1]["completions"], "cases": cases[:1]},
        groups[0] | {"quantize": None, "cases": cases[:1]},
    ]
    *found, [stale], [unrounded] = gaps(tmp_path / "ranks", [*groups, *others])
    assert_none(groups, found)
    assert stale["gap/max"] > 0, "weights of another version must show"
    assert unrounded["gap/max"] > 0, "a trainer that does not round its weights must show"


def run_config(directory: Path, prompts: Path, rule: str) -> Path:
    """A run of the quickstart's task."""
    model = make_block_model(directory / "model")
    return write_config(
        directory,
        model,
        prompts,
        numerics={"mode": "exact", "dtype": "bfloat16"},
        publish={"quantize": rule},
        rollout={"engines": [{"model": str(in_fp8(model, directory / "fp8", rule)), "max_total_tokens": 8192}]},
        algorithm={"reference": True, "kl_coef": 0.01, "old_logprobs": "recompute"},
        schedule={"steps": 3},
    )


@pytest.mark.slow("full grid of models and layouts, two whole runs")
@pytest.mark.parametrize("rule", ["ieee", "ue8m0"])
def test_a_run_has_no_gap_over_publications(rule: str, task_of_sums: Path, tmp_path: Path) -> None:
    run = TrainProcess(run_config(tmp_path, task_of_sums / "train.jsonl", rule))
    check_run(run, tmp_path / "run")
