"""Engines that die, hang or refuse in the middle of a publication: the others go on, and the lost ones come back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimx.engines.fleet.group import EngineGroup
from slimx.engines.fleet.handle import EngineHandle, MemberState
from slimx.engines.server.http_calls import ControlClient
from slimx.engines.transport import MemoryDelivery
from slimx.errors import LOST
from slimx.models.families import read_model
from slimx.reshard.manifest import Publication
from slimx.reshard.parties import NoReceiverLeft
from slimx.reshard.publish import Publisher, Staging
from slimx.reshard.transports.memory import MemoryFile
from slimx.rollout.client.generation import Completion, GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from tests.integration.conftest import Weights
from tests.integration.engine_oracle import PROMPT, fused
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config
from tests.integration.stand_in_trainers import Trainers
from tests.integration.two_engines import two_engines
from tests.refusals import refused

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
RESTART_S = 600


class Stand:
    """Two real engines behind their router, published to by `Trainers`, while clients keep asking for tokens."""

    def __init__(self, group: EngineGroup, trainers: Trainers, client: GenerationClient):
        self.group, self.trainers, self.client = group, trainers, client
        self.members, (self.first, self.second) = group.members, group.engines
        self.publisher = Publisher(
            trainers, group.members, MemoryDelivery(trainers), deadline_s=600, step_deadline_s=120
        )
        self.completions: list[Completion] = []

    async def publish(self, version: int, staging: Staging = "model") -> Publication:
        self.trainers.version, self.publisher.staging = version, staging
        return await self.publisher.publish(version, trainer_step=version)

    async def back(self, engine: EngineHandle) -> None:
        """Waits until a lost engine runs again. It is not in the router: nothing was published to it."""
        async with asyncio.timeout(RESTART_S):
            while engine.state is not MemberState.JOINING:
                assert engine.state is MemberState.OUT
                await asyncio.sleep(0.1)
        assert engine.url not in await self.registered()

    async def registered(self) -> set[str]:
        return {worker["url"] for worker in await self.group.router.workers()}

    async def keep_asking(self, seed: int) -> None:
        while True:
            seed += 1000
            self.completions.append(await self.client.generate(GenerationRequest(PROMPT, SAMPLING, seed)))
            await asyncio.sleep(0.5)  # the servers that start meanwhile need the cores too


async def process_of(engine: EngineHandle) -> int:
    """Returns the server's scheduler, which holds the model."""
    return (await ControlClient(engine.url, keys=engine.spec.keys).request_ranks("attest"))[0]["pid"]


@asynccontextmanager
async def engines_and_clients(tiny_model: Path, weights: Weights, directory: Path) -> AsyncIterator[Stand]:
    publish, health = {"transport": "memory"}, {"interval": 1, "timeout": 60}
    begun = two_engines(tiny_model, directory, start_deadline=RESTART_S, publish=publish, health=health)
    async with begun as (group, _), AsyncExitStack() as stack:
        shape = ModelShape.of(read_model(tiny_model))
        client = GenerationClient(
            group.router.url,
            shape,
            on_lost=group.members.look,
            outage=group.members.outage,
            api_key=group.keys.api_key,
        )
        stand = Stand(group, Trainers(weights), await stack.enter_async_context(client))
        yield stand


@contextmanager
def spoilt(engine: EngineHandle, bucket: int) -> Iterator[None]:
    """Gives `engine` alone one bucket with a changed byte."""

    async def perform(verb: str, epoch: int | None, *arguments: Any, **deadline: float) -> Any:
        if verb != "stage" or arguments[1] != bucket:
            return await forward(verb, epoch, *arguments, **deadline)
        packed, number = arguments
        data = bytearray(Path(packed.path).read_bytes())
        data[packed.tensors[2].offset] ^= 1
        copy = MemoryFile(len(data))
        copy.bytes.copy_(torch.frombuffer(data, dtype=torch.uint8))
        try:
            await forward("stage", epoch, replace(packed, path=copy.path), number)
        finally:
            copy.close()

    forward, engine.perform = engine.perform, perform
    try:
        yield
    finally:
        del engine.perform


@torch.no_grad()
def check_tokens(completions: list[Completion], weights: Callable[[int], Weights], model: Path) -> None:
    """Asserts that every token was sampled by exactly the published weights of the version that it names."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()] for completion in completions])
    logprobs = np.stack([completion.logprobs for completion in completions])
    versions = np.zeros(logprobs.shape, int)
    for row, completion in zip(versions, completions, strict=True):
        for start, stop, version in completion.versions:
            row[start:stop] = version
    for version in np.unique(versions):
        oracle.load_state_dict(fused(oracle, weights(int(version))))
        rows = oracle(ids).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = rows.gather(-1, ids[:, len(PROMPT) :, None])[..., 0].numpy()
        np.testing.assert_allclose(logprobs[versions == version], expected[versions == version], atol=1e-4)


async def test_faults_in_publications_cost_one_engine_and_no_token(tiny_model, tiny_weights, tmp_path):
    async with engines_and_clients(tiny_model, tiny_weights, tmp_path) as stand:
        first, second, trainers = stand.first, stand.second, stand.trainers
        assert not await stand.registered(), "no request before the first verified publication"
        assert (await stand.publish(1)).lost == []
        assert await stand.registered() == {first.url, second.url}
        asking = [asyncio.create_task(stand.keep_asking(seed)) for seed in range(3)]
        try:
            # Killed in the middle of staging. Another publication at that moment is refused.
            victim, others = await process_of(first), []

            def kill_and_publish_another(bucket: int) -> None:
                if bucket == 1:
                    os.kill(victim, signal.SIGKILL)
                    others.append(asyncio.create_task(stand.publisher.publish(9, trainer_step=9)))

            trainers.at_bucket = kill_and_publish_another
            done = await stand.publish(2)
            assert done.lost == ["actor-0"] and done.engines["actor-0"].step == "stage"
            assert await stand.registered() == {second.url}
            with refused("publish.under_way", about="version 9"):
                await others[0]

            # Stopped when a third of its weights are new: it never answers again, and it must never serve. The other
            # one, just back, catches up.
            trainers.at_bucket = lambda bucket: None
            await stand.back(first)
            victim = await process_of(second)
            trainers.at_bucket = lambda bucket: os.kill(victim, signal.SIGSTOP) if bucket == 2 else None
            stand.publisher.step_deadline_s = 8
            done = await stand.publish(3, "bucket")
            # The step's deadline passes, or its guard ends the tree first, which two watches may see.
            assert done.lost == ["actor-1"]
            assert done.engines["actor-1"].error.code in ("engine.silent", "engine.lost", "engine.ended")
            assert done.engines["actor-0"].tensors == len(tiny_weights)
            assert await stand.registered() == {first.url}

            trainers.at_bucket, stand.publisher.step_deadline_s = lambda bucket: None, 120
            await stand.back(second)
            assert (await stand.publish(4)).lost == []
            assert await stand.registered() == {first.url, second.url}

            for engine in (first, second):
                async with GenerationClient(engine.url, stand.client.shape, api_key=engine.spec.keys.api_key) as client:
                    stand.completions.append(await client.generate(GenerationRequest(PROMPT, SAMPLING, 1)))
                assert stand.completions[-1].versions == [(0, 8, 4)]

            # One engine meets a changed byte; what comes next finds the other one alone.
            with spoilt(first, bucket=1):
                done = await stand.publish(5)
            assert done.lost == ["actor-0"] and "has checksum" in str(done.engines["actor-0"].error)
            assert await stand.registered() == {second.url}
            async with GenerationClient(second.url, stand.client.shape, api_key=second.spec.keys.api_key) as client:
                stand.completions.append(await client.generate(GenerationRequest(PROMPT, SAMPLING, 1)))
            assert stand.completions[-1].versions == [(0, 8, 5)]
        finally:
            for one in asking:
                one.cancel()
            ended = await asyncio.gather(*asking, return_exceptions=True)
        assert [end for end in ended if not isinstance(end, asyncio.CancelledError)] == [], "no request may fail"
        counts = stand.members.metrics()
        assert (counts["engines/lost"], counts["engines/restarted"], counts["engines/serving"]) == (3, 2, 1)

        # What no engine can take may be the engines' fault: they are started again before the same is tried again.
        trainers.renamed = {"model.norm.weight": "model.norm.wait"}
        with pytest.raises(NoReceiverLeft) as caught:
            await stand.publish(6)
        assert (caught.value.code, caught.value.about) == ("publish.refused", "stage")
        assert "model.norm.wait" in str(caught.value) and not stand.members.candidates()
    served = {version for completion in stand.completions for _, _, version in completion.versions}
    assert {2, 3, 4, 5} <= served <= {1, 2, 3, 4, 5}
    check_tokens(stand.completions, trainers.weights, tiny_model)


def scheduler(run: TrainProcess) -> psutil.Process:
    (found,) = [p for p in run.processes() if "sglang::scheduler" in " ".join(p.cmdline())]
    return found


@pytest.mark.slow("a whole run that loses its engine twice")
def test_a_run_waits_for_its_only_engine_unless_it_may_not_restart(
    tiny_model,
    task_of_sums,
    tmp_path,
):
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        schedule={"steps": 1000},
        rollout={
            "prompts": str(task_of_sums / "train.jsonl"),
            "generate": "examples.two_turn.generate",
            # Most of a step is generation: that is where the engine dies.
            "sampling": {"max_new_tokens": 100, "stop_token_ids": [20, 21]},
            "health": {"interval": 0.5, "timeout": 30, "restarts": 1},
        },
        publish={"transport": "disk", "bucket_mib": 0.25},
    )
    directory, run = tmp_path / "run", TrainProcess(config)
    run.until(lambda: completed_steps(directory) >= 1)
    victim = scheduler(run)
    known = completed_steps(directory)
    run.until(lambda: completed_steps(directory) > known)
    victim.kill()
    before = completed_steps(directory)
    run.until(lambda: completed_steps(directory) >= before + 3)
    rows, last = steps(directory), completed_steps(directory)
    scheduler(run).kill()
    assert run.wait() == LOST, run.text()
    messages = [line for line in run.text().splitlines() if line.startswith("slimx: ")]
    assert len(messages) == 1 and "engine actor-0" in messages[0] and "engine-actor-0.log" in messages[0], run.text()
    assert "Traceback" not in run.text()
    assert any("engine actor-0" in line and "1 of 1" in line for line in run.text().splitlines()), "its restart"
    run.assert_nothing_left()
    restored = [line for line in run.text().splitlines() if "engine actor-0" in line and "/version-" in line]
    assert restored, "from the files, without the trainers"
    row = rows[last]
    assert (row["engines/lost"], row["engines/restarted"], row["engines/serving"]) == (1, 1, 1)
    assert row["rollout/request_retries"] >= 1, "hooks did not notice, so the requests under way were sent again"
    for row in rows.values():
        assert row["dropped/total"] == 0 and row["staleness/max"] == 0
        assert row["gap/tokens"] > 0 and row["gap/mean"] <= 1e-5 and row["gap/tokens_unexplained"] == 0
