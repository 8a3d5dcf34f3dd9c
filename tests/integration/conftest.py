"""Shared by all integration tests: one tiny model, and one real SGLang server for each worker of the session.

Every test uses the same server and leaves it READY, with any weights: a test that needs particular weights publishes
them first (`publish`), and none relies on what an earlier test left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from slimx.engines.server.engine import Engine
from slimx.engines.server.spec import EngineSpec
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.manifest import Encoding, Manifest
from slimx.reshard.packed import PackedBucket, PackedTensor
from tests.integration.recorded import recording_config
from tests.integration.runs import TrainProcess
from tests.warm import guards
from tests.warm.interpreter import interpreter
from tests.workers import made_once

ROOT = Path(__file__).parents[2]
START_S = 600
"""Seconds for one server to start, for hangs: as a program it takes 20 to 50 s on two idle cores."""
Weights = dict[str, torch.Tensor]


STARTERS = {"TrainProcess", "interpreter", "run_program"}
"""Names that a file of whole runs or programs imports."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files of whole runs and programs first: with a long one at the end, all other cores would wait for it."""
    items.sort(key=lambda item: not STARTERS & vars(getattr(item, "module", item)).keys())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Ends the runs that a test leaves when it fails, which would take the time of others."""
    before = len(TrainProcess.started)
    try:
        return (yield)
    except BaseException:
        for run in TrainProcess.started[before:]:
            run.kill(signal.SIGTERM)
        raise


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face directory of the quickstart's Qwen3-MoE (float32, 2 layers, 8 experts, vocabulary 128)."""

    def make(out: Path) -> None:
        runpy.run_path(str(ROOT / "slimx/extras/quickstart/make_model.py"))["make_model"](out, seed=1)

    return made_once(tmp_path_factory, "tiny_model", make)


@pytest.fixture(scope="session")
def deep_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model, with four layers, so that virtual stages of pipelines have one each."""

    def make(out: Path) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        shutil.copytree(tiny_model, out, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((tiny_model / "config.json").read_text()) | {"num_hidden_layers": 4}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).to(torch.float32).save_pretrained(out)
        (out / "config.json").write_text(json.dumps(config))

    return made_once(tmp_path_factory, "deep_model", make)


@pytest.fixture(scope="session")
def tiny_weights(tiny_model: Path) -> Weights:
    """The tensors of `tiny_model` by Hugging Face name."""
    return load_file(tiny_model / "model.safetensors")


@pytest.fixture(scope="session", autouse=True)
def _warm_servers(_cache_of_model_code: None) -> Iterator[None]:
    """Servers are forks of a process that has imported SGLang, but where a program of a test starts them."""
    with pytest.MonkeyPatch.context() as patch:
        guards.install(patch, interpreter().parent)
        yield


@pytest.fixture(params=[1, pytest.param(3, marks=pytest.mark.slow("the same with rollout workers"))])
def workers(request: pytest.FixtureRequest) -> int:
    """Number of processes that generate rollouts."""
    return request.param


@pytest.fixture
def warm_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that the test starts in this process has forks for its workers, as that of a `TrainProcess`."""
    monkeypatch.setattr(sys, "executable", str(interpreter()))


@pytest.fixture(scope="session")
def task_of_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the quickstart's task."""

    def make(out: Path) -> None:
        runpy.run_path(str(ROOT / "slimx/extras/quickstart/make_task.py"))["make_task"](out, seed=1)

    return made_once(tmp_path_factory, "task", make)


@pytest.fixture(scope="session")
def uninterrupted(tiny_model: Path, task_of_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished run that wrote its tokens down, one request at a time."""

    def run(directory: Path) -> None:
        process = TrainProcess(recording_config(directory, tiny_model, task_of_sums))
        assert process.wait() == 0, process.text()
        process.assert_nothing_left()

    return made_once(tmp_path_factory, "uninterrupted", run)


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real server of `tiny_model` on the CPU, READY and attested, without a published version."""
    spec = EngineSpec("test", str(tiny_model), "float32", "cpu", max_total_tokens=16384, seed=1)
    engine = Engine(spec, tmp_path_factory.mktemp("engine") / "server.log")
    try:
        asyncio.run(engine.start(START_S))
        yield engine
    finally:
        asyncio.run(engine.stop())


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[dict[str, Any]]:
    """A group of `rollout.engines` that is `engine`, a server that runs already; its keys are in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINES_KEY", engine.spec.keys.api_key)
        patch.setenv("ENGINES_ADMIN_KEY", engine.spec.keys.admin_api_key)
        yield {"urls": [engine.spec.url], "api_key_env": "ENGINES_KEY", "admin_api_key_env": "ENGINES_ADMIN_KEY"}


class Bucket:
    """A packed bucket in a memory file of this process, as publishers offer it; closed when engines have copied it."""

    def __init__(self, *targets: Weights) -> None:
        """One target for Hugging Face names, one per engine rank for rank-local buckets."""
        self.fd, size = os.memfd_create("slimx-bucket"), 0
        packed: list[tuple[PackedTensor, ...]] = []
        with os.fdopen(os.dup(self.fd), "wb") as file:
            for weights in targets:
                tensors = []
                for name, weight in weights.items():
                    tensor = weight.detach().contiguous()
                    form = name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
                    tensors.append(PackedTensor(*form, size, tensor.nbytes, checksum_tensor(tensor)))
                    raw = tensor.view(torch.uint8).numpy().tobytes()
                    file.write(raw + bytes(-len(raw) % 64))
                    size = file.tell()
                packed.append(tuple(tensors))
        self.packed = PackedBucket(f"/proc/{os.getpid()}/fd/{self.fd}", size, tuple(packed))

    @property
    def tensors(self) -> tuple[PackedTensor, ...]:
        return self.packed.tensors

    def flip(self, offset: int) -> None:
        """Spoil one byte."""
        byte = os.pread(self.fd, 1, offset)[0]
        os.pwrite(self.fd, bytes([byte ^ 1]), offset)

    def __enter__(self) -> Bucket:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def manifest(version: int, encoding: Encoding = "hf", epoch: int = 0) -> Manifest:
    """A publication of whole weights."""
    return Manifest(policy="actor", version=version, encoding=encoding, trainer_step=version, membership_epoch=epoch)


async def present(engine: Engine, version: int, encoding: Encoding = "hf") -> Manifest:
    """The same in the newest epoch that the engine has seen: a run may have published to it."""
    newest = max(rank["epoch"] for rank in await engine.wire.request_ranks("attest"))
    return manifest(version, encoding, max(0, newest))


async def publish(
    engine: Engine, weights: Weights | list[Weights], version: int, staging: Literal["model", "bucket"] = "model"
) -> None:
    """The whole publication of `weights` in two buckets; the engine is READY before and after.

    A list is one per engine rank: rank-local tensors.
    """
    encoding, targets = ("local", weights) if isinstance(weights, list) else ("hf", [weights])
    await engine.begin(await present(engine, version, encoding), staging)
    if staging == "bucket":
        await engine.pause()
    with contextlib.ExitStack() as buckets:
        for number in range(2):
            # Every other tensor, so that those which a model fuses come apart.
            parts = [dict(list(target.items())[number::2]) for target in targets]
            await engine.stage(buckets.enter_context(Bucket(*parts)).packed, number)
            if staging == "bucket":
                await engine.load()
        if staging == "model":
            await engine.pause()
            await engine.load()
    await engine.verify()
    await engine.commit(version)
    await engine.resume()


def perturbed(weights: Weights, seed: int, scale: float = 0.05) -> Weights:
    """Other weights of the same shapes, different in every tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {name: w + scale * torch.randn(w.shape, generator=generator).to(w.dtype) for name, w in weights.items()}
