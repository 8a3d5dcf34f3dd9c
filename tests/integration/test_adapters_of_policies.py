"""Two policies on a shared base, with the adapters of both on each engine: a server, and whole runs."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.engines.server.engine import Engine
from slimx.engines.server.spec import EngineSpec
from slimx.extras.lora.form import ServedLora
from slimx.extras.lora.targets import adapter_targets, peft_name, served_modules
from slimx.models.families import read_model
from slimx.orchestration.state.saves import read_state
from slimx.reshard.manifest import Encoding, Manifest
from slimx.rollout.client.completion import ModelShape
from slimx.rollout.client.generation import GenerationClient
from slimx.rollout.client.request import GenerationRequest
from tests.integration.conftest import START_S, Bucket, Weights
from tests.integration.engine_families import make_model
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.test_run_lora import GAPS, engines, exported
from tests.refusals import refused

pytestmark = [pytest.mark.integration, pytest.mark.slow("a server and whole runs"), pytest.mark.timeout(3600)]
TARGETS = ["attention", "mlp"]
ALPHAS = {"actor": 8.0, "judge": 16.0}
POLICIES = ("", "policy/judge/")
"""Beginning of the names of each policy's metrics."""
PROMPT = [5, 9, 40, 77, 3, 12]


async def publish(engine: Engine, policy: str, version: int, weights: Weights, encoding: Encoding = "adapters") -> None:
    """Publishes `weights` in one bucket; the engine is READY before and after."""
    of = Manifest(policy=policy, version=version, encoding=encoding, trainer_step=version, membership_epoch=0)
    await engine.begin(of)
    with Bucket(weights) as bucket:
        await engine.stage(bucket.packed, 0)
        await engine.pause()
        await engine.load()
    assert (await engine.verify())["checked"] == len(weights)
    await engine.commit(version)
    await engine.resume()


def logprobs_of(model: Path, adapters: Weights, alpha: float, ids: list[int]) -> np.ndarray:
    """Returns log-probs [L - 1] of the model in directory `model` with `adapters` merged, by transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    weights = load_file(model / "model.safetensors")
    merged = {
        name: value + alpha / 4 * adapters[peft_name(name, "B")] @ adapters[peft_name(name, "A")]
        for name, value in weights.items()
        if peft_name(name, "B") in adapters
    }
    assert merged
    with torch.no_grad():
        loaded.load_state_dict(merged, strict=False)
        rows = loaded(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


async def test_a_server_answers_each_policy_with_its_adapters_and_version(tmp_path: Path) -> None:
    """In one batch; requests that name no policy are refused, or another one would answer."""
    make_model("qwen2", model := tmp_path / "model")
    spec = read_model(model)
    generator = torch.Generator().manual_seed(7)
    parts = [*adapter_targets(spec.table, TARGETS, 4)]
    first, second, newer = (
        {part.name: 0.1 * torch.randn(part.shape, generator=generator) for part in parts} for _ in range(3)
    )
    served = ServedLora(ALPHAS, 4, served_modules(TARGETS))
    engine = Engine(
        EngineSpec(
            "two",
            str(model),
            "float32",
            "cpu",
            max_total_tokens=4096,
            routed_experts=False,
            form=served,
        ),
        tmp_path / "server.log",
    )
    key = engine.spec.keys.api_key
    try:
        await engine.start(START_S)
        await publish(engine, "actor", 3, load_file(model / "model.safetensors") | first, "hf")
        for version, judged in ((3, second), (4, newer)):
            await publish(engine, "judge", version, judged)
            for policy, adapters, current in (("actor", first, 3), ("judge", judged, version)):
                async with (
                    GenerationClient(engine.spec.url, ModelShape.of(spec), api_key=key, adapters=policy) as client,
                    GenerationClient(engine.spec.url, ModelShape.of(spec), api_key=key, adapters="actor") as other,
                ):
                    request = GenerationRequest(PROMPT, {"max_new_tokens": 12, "ignore_eos": True}, seed=3)
                    completion, *_ = await asyncio.gather(
                        client.generate(request), *(other.generate(request) for _ in range(3))
                    )
                assert completion.versions == [(0, 12, current)]
                ids = [*PROMPT, *completion.token_ids.tolist()]
                expected = logprobs_of(model, adapters, ALPHAS[policy], ids)[len(PROMPT) - 1 :]
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
                theirs = logprobs_of(model, first if policy == "judge" else judged, 8.0, ids)[len(PROMPT) - 1 :]
                assert np.abs(completion.logprobs - theirs).max() > 1e-2, "the adapters matter"
        async with GenerationClient(engine.spec.url, ModelShape.of(spec), api_key=key) as unnamed:
            with refused("request.refused") as caught:
                await unnamed.generate(request)
        assert caught.value.status == 400
    finally:
        await engine.stop()


@dataclass(frozen=True)
class Case:
    """A run of two policies, some of whose servers are killed after step 2."""

    model: str | None
    """Name of a model; None: the quickstart's mixture of experts."""
    dtype: str
    targets: list[str]
    servers: int
    killed: int


CASES = {
    "dense": Case("qwen2", "float32", ["attention", "mlp"], servers=2, killed=1),
    "experts": Case(None, "bfloat16", ["attention"], servers=2, killed=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_engines_generate_for_two_policies_with_separate_adapters(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path, case: Case
) -> None:
    """Log-probs are those of each policy's trainer; a server that is killed gets the base and both adapters when it is
    back, and before it serves; and a resumed run goes on with both."""
    model, targets = tiny_model, case.targets
    if case.model is not None:
        make_model(case.model, model := tmp_path / "model")
    prompts, hold = tmp_path / "prompts.jsonl", tmp_path / "hold"
    rows = map(json.loads, (task_of_sums / "train.jsonl").read_text().splitlines())
    delayed = ({**row, "metadata": {**row["metadata"], "hold": str(hold)}} for row in rows)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in delayed))
    config = write_config(
        tmp_path,
        model,
        prompts,
        numerics={"dtype": case.dtype},
        trainer={
            "world_size": 1,
            "expert": 1,
            "lora": {"rank": 4, "alpha": 8, "targets": targets},
            "optimizer": {"lr": 1e-2},
        },
        rollout={
            "generate": "tests.integration.policy_hooks.answered_and_judged",
            "engines": [{"name": "actor", "count": case.servers, "max_total_tokens": 8192}],
        },
        reward={"function": "tests.integration.policy_hooks.opposed"},
        policies={
            "judge": {"engines_of": "actor", "trainer": {"lora": {"alpha": 16}, "optimizer": {"lr": 2e-2}}},
        },
        publish={"adapters": "alone", "transport": "memory"},
        schedule={"steps": 4},
        checkpoint={"every": 2, "export_hf": True},
    )
    if others_serve := case.killed < case.servers:
        hold.touch()
    run, directory = TrainProcess(config), tmp_path / "run"
    run.until(lambda: completed_steps(directory) >= 2, 3000)
    by_port: dict[str, list[psutil.Process]] = {}
    for server in engines(run):
        by_port.setdefault(server.cmdline()[server.cmdline().index("--port") + 1], []).append(server)
    assert len(by_port) == case.servers, "the same servers for both"
    for processes in [*by_port.values()][: case.killed]:
        for server in processes:
            server.kill()
    if others_serve:
        run.until(lambda: "joining" in standings(directory), 3000)
        assert standings(directory).count("member") == case.servers - case.killed
        hold.unlink()
    assert run.wait(3000) == 0, run.text()
    run.assert_nothing_left()
    resumed = TrainProcess(config, "schedule.steps=5")
    assert resumed.wait(3000) == 0, resumed.text()

    by_step = steps(directory)
    assert [*by_step] == [1, 2, 3, 4, 5]
    parts = [*adapter_targets(read_model(model).table, targets, 4)]
    few = sum(getattr(torch, case.dtype).itemsize * math.prod(part.shape) for part in parts) / 2**20
    gap, bound = GAPS[case.dtype]
    for prefix in POLICIES:
        for step, metrics in by_step.items():
            assert metrics[f"{prefix}gap/tokens"] > 0 and metrics[prefix + gap] < bound, (prefix, step)
        assert [by_step[step][f"{prefix}publish/mib"] for step in (1, 2, 5)] == [pytest.approx(few)] * 3
        assert [by_step[step][f"{prefix}publish/tensors_verified"] for step in (1, 2)] == [len(parts)] * 2
        for step in (1, 2, 5):
            assert by_step[step][f"{prefix}publish/engines_verified"] == case.servers
    if others_serve:
        assert by_step[3]["publish/mib"] > 2 * few, "to the one that is back, with the base"
        serving = [by_step[3][f"{prefix}engines/serving"] for prefix in POLICIES]
        assert serving == [case.servers - case.killed, case.servers], "it serves after the last policy's part"
        assert by_step[3]["publish/engines_verified"] == by_step[4]["engines/serving"] == case.servers
    timeline = [json.loads(line) for line in (directory / "timeline.jsonl").open()]
    back = {line["track"] for line in timeline if line["track"].startswith("engine ") and line["name"] == "restart"}
    assert len(back) == case.killed

    for step, file in step_files(directory / DIRECTORY).items():
        for group in read_step(file)[1]:
            for trajectory in group.trajectories:
                sampled = [span for span in trajectory.spans if span.source == "sampled"]
                assert {(span.policy, span.version) for span in sampled} == {(trajectory.policy, step - 1)}
    base = load_file(model / "model.safetensors")
    adapted = {name for name in base if peft_name(name, "B") in {part.name for part in parts}}
    actor, judge = exported(directory / "hf"), exported(directory / "hf" / "policies" / "judge")
    for name, weight in base.items():
        weight = weight.to(actor[name].dtype)
        one, other = torch.equal(actor[name], weight), torch.equal(judge[name], weight)
        assert torch.equal(actor[name], judge[name]) == one == other == (name not in adapted), name
    state = read_state(directory / "checkpoints" / "iter_0000004")
    assert [state.policies[name]["lora"]["alpha"] for name in ("actor", "judge")] == [8, 16]


def standings(directory: Path) -> list[str]:
    """Returns the standing of each engine of the run in `directory`."""
    return [engine["standing"] for engine in json.loads((directory / "engines.json").read_text())["engines"]]
