"""Groups beyond servers of one machine that slimx starts: a server over two machines, and servers that run already."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slimx.cluster.connection import start_ray, stop_ray
from slimx.config.schema import Config
from slimx.data.chat.tokens import load_tokenizer
from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.handle import MemberState
from slimx.engines.server.engine import Engine
from slimx.extras.direct.delivery import DirectDelivery
from slimx.extras.direct.source import DirectSource
from slimx.extras.served_models.client import FrozenEngine
from slimx.extras.served_models.engines import ServedModels
from slimx.extras.served_models.teacher import check_vocabulary
from slimx.layout.ranks import EngineSizes
from slimx.models.families import read_model
from slimx.reshard.manifest import Encoding
from slimx.reshard.publish import Publisher
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from tests.integration.conftest import START_S, Weights, perturbed, publish
from tests.integration.direct_trainers import DirectTrainers, plan_for
from tests.integration.engine_oracle import PROMPT, logprobs_of
from tests.integration.stand_in_trainers import Trainers
from tests.refusals import refused
from tests.waits import until

pytestmark = pytest.mark.integration
SAMPLING = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}


def config_of(model: Path, directory: Path, engines: list[dict[str, Any]], transport: str) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": str(model)},
            "numerics": {"dtype": "float32"},
            "cluster": {"device": "cpu", "start_deadline": START_S},
            "publish": {"transport": transport},
            "rollout": {
                "prompts": "none",
                "engines": engines,
                "health": {"interval": 1, "timeout": 60, "restarts": 0},
            },
        }
    )


@asynccontextmanager
async def ray_for(config: Config) -> AsyncIterator[AsyncExitStack]:
    start_ray(config, "cpu")
    try:
        async with AsyncExitStack() as stack:
            yield stack
    finally:
        stop_ray()


def expected_logprobs(model: Path, weights: Weights, ids: list[int]) -> np.ndarray:
    """Returns those of transformers: of each token but the first."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return logprobs_of(oracle, weights, ids)


async def publishing_of(
    config: Config, group: EngineGroup, model: Path, weights: Weights, encoding: Encoding
) -> tuple[Publisher, Weights]:
    """Returns a publisher to `group`'s only server, and what its version 3 is."""
    (engine,) = group.engines
    plan = plan_for(model, EngineSizes(tensor=2, expert=2) if encoding == "local" else None, 2**17)
    trainers = DirectTrainers(model, plan, config.cluster.network, step_deadline_s=300)
    to_both = DirectDelivery(trainers, {engine.name: [None] * engine.nodes}, step_deadline_s=300, changes=(2, 2))
    await trainers.hold(3)
    source = DirectSource(to_both)
    publisher = Publisher(source, group.members, to_both, deadline_s=600, step_deadline_s=300, encoding=encoding)
    return publisher, perturbed(weights, seed=3)


@pytest.mark.slow("a server over two machines, twice")
@pytest.mark.parametrize("encoding", ["hf", "local"])
async def test_a_server_over_two_machines_is_lost_with_either(
    encoding: Encoding, tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    """Two server processes on the loopback interface, each with the process that brings its buckets."""
    pytest.importorskip("nixl_cu13", reason="NIXL is not installed (requirements/cpu.txt pins it)")
    engines = [{"name": "wide", "tensor": 2, "expert": 2, "nodes": 2, "max_total_tokens": 4096}]
    config = config_of(tiny_model, tmp_path, engines, "nixl")
    async with ray_for(config) as stack:
        group = EngineGroup(config, "cpu", tmp_path, moe=True, note=print)
        stack.push_async_callback(group.stop)
        await group.start()
        (engine,) = group.engines
        publisher, weights = await publishing_of(config, group, tiny_model, tiny_weights, encoding)
        for _ in range(2):  # the second one brings what has changed: nothing
            done = await publisher.publish(3, trainer_step=3)
            assert not done.lost and engine.state is MemberState.MEMBER
        assert 0 < done.wire < 0.05 * done.nbytes
        shape = ModelShape.of(read_model(tiny_model))
        async with GenerationClient(group.router.url, shape, api_key=group.keys.api_key) as client:
            completion = await client.generate(GenerationRequest(PROMPT, SAMPLING, seed=1, routed_experts=True))
        ids = [*PROMPT, *completion.token_ids.tolist()]
        assert completion.versions == [(0, 8, 3)]
        expected = expected_logprobs(tiny_model, weights, ids)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)

        servers = [process for process in psutil.process_iter(["cmdline"]) if _is_share(process, tiny_model, rank=1)]
        assert servers, "the second machine's share has a process of its own"
        servers[0].kill()
        group.members.watch()
        await until(lambda: engine.state is MemberState.GONE)
        with refused("engines.gone", about="wide-0"):
            await group.members.failed()
        left = [process for process in psutil.process_iter(["cmdline"]) if _is_share(process, tiny_model, rank=0)]
        assert not left, "the first machine's share ends with the second's"


def _is_share(process: psutil.Process, model: Path, rank: int) -> bool:
    """Returns True for the first process of a share of a server of `model`."""
    line = process.info["cmdline"] or []
    return (
        "slimx.engines.server.launch" in line
        and str(model) in line
        and ("--node-rank", str(rank)) in zip(line, line[1:], strict=False)
    )


async def test_a_server_that_runs_already_is_used_and_left_as_it_was(
    engine: Engine, running: dict[str, Any], tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    """As an engine of the policy it is attested and published to, as a frozen model it answers hooks."""
    config = config_of(tiny_model, tmp_path, [running], "memory")
    async with ray_for(config) as stack:
        group = EngineGroup(config, "cpu", tmp_path, moe=True, note=print)
        stack.push_async_callback(group.stop)
        await group.start()
        trainers = Trainers(tiny_weights)
        trainers.version = 5
        await Publisher(trainers, group.members, deadline_s=600, step_deadline_s=300).publish(5, trainer_step=5)
        shape = ModelShape.of(read_model(tiny_model))
        async with GenerationClient(group.router.url, shape, api_key=group.keys.api_key) as client:
            completion = await client.generate(GenerationRequest(PROMPT, SAMPLING, seed=2))
        assert completion.versions == [(0, 8, 5)]
        ids = [*PROMPT, *completion.token_ids.tolist()]
        expected = expected_logprobs(tiny_model, perturbed(tiny_weights, seed=5), ids)
        np.testing.assert_allclose(completion.logprobs, expected[len(PROMPT) - 1 :], atol=1e-4)

        judges = config_of(
            tiny_model, tmp_path, [{"name": "a"}, {"name": "judge", "frozen": True, **running}], "memory"
        )
        frozen = ServedModels(judges, "cpu", tmp_path, note=print)
        stack.push_async_callback(frozen.stop)
        await frozen.start()
        scored = await asyncio.to_thread(
            asyncio.run, frozen.clients["judge"].logprobs(ids)
        )  # as a reward's thread does
        np.testing.assert_allclose(scored, expected, atol=1e-4)
        later = await frozen.clients["judge"].logprobs(ids, start=len(PROMPT))
        np.testing.assert_allclose(later, expected[len(PROMPT) - 1 :], atol=1e-4)
        served = FrozenEngine("judge", engine.spec.url, deadline_s=300, retries=0, api_key=engine.spec.keys.api_key)
        await check_vocabulary(served, load_tokenizer(tiny_model))
        assert frozen.metrics()["engines/judge/serving"] == 1

        shutil.copytree(tiny_model, spoilt := tmp_path / "spoilt")
        save_file({"w": torch.tensor([float("nan")])}, spoilt / "model.safetensors")
        judge = {"name": "judge", "frozen": True, "model": str(spoilt)}
        unread = ServedModels(
            config_of(tiny_model, tmp_path, [{"name": "a"}, judge], "memory"), "cpu", tmp_path, note=print
        )
        stack.push_async_callback(unread.stop)
        with refused("checkpoint.finite", about="w"):
            await unread.start()

        other = config_of(tiny_model, tmp_path, [running | {"tensor": 2}], "memory")
        wrong = EngineGroup(other, "cpu", tmp_path, moe=True, note=print)
        stack.push_async_callback(wrong.stop)
        with refused("engine.sizes"):
            await wrong.start()
    await engine.check_health(60)
    await publish(engine, tiny_weights, 6)  # its owner goes on
