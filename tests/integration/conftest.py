"""Shared by all integration tests: one tiny model, and one real SGLang server for the whole session.

The server takes 15 to 45 s to start, so every test uses the same one and leaves it READY with the weights of its own
choice: a test that needs particular weights publishes them first (`publish`), and none relies on what an earlier test
left.
"""

from __future__ import annotations

import asyncio
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimx.ports import free_port
from slimx.reshard.kernel import checksum_tensor
from slimx.reshard.packed import PackedTensor
from slimx.rollout.engine import Engine, EngineSpec

ROOT = Path(__file__).parents[2]
START_S = 180
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face directory of the quickstart's Qwen3-MoE (float32, 2 layers, 8 experts, vocabulary 128)."""
    out = tmp_path_factory.mktemp("tiny_model")
    runpy.run_path(str(ROOT / "tools/quickstart/make_model.py"))["make_model"](out, seed=1)
    return out


@pytest.fixture(scope="session")
def tiny_weights(tiny_model: Path) -> Weights:
    """The tensors of `tiny_model` by Hugging Face name."""
    return load_file(tiny_model / "model.safetensors")


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real server of `tiny_model` on the CPU, READY and attested, without a published version."""
    spec = EngineSpec("test", str(tiny_model), "float32", "cpu", free_port(), max_total_tokens=16384, seed=1)
    engine = Engine(spec, tmp_path_factory.mktemp("engine") / "server.log")
    engine.start()
    try:
        asyncio.run(engine.wait_ready(START_S))
        yield engine
    finally:
        asyncio.run(engine.stop())


class Bucket:
    """Tensors in a memory file of this process, as a publisher offers them; closed when the engine has copied them."""

    def __init__(self, weights: Weights) -> None:
        self.fd = os.memfd_create("slimx-bucket")
        self.tensors: list[PackedTensor] = []
        self.size = 0
        with os.fdopen(os.dup(self.fd), "wb") as file:
            for name, tensor in weights.items():
                raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                kind = str(tensor.dtype).removeprefix("torch.")
                self.tensors.append(
                    PackedTensor(
                        name, kind, tuple(tensor.shape), self.size, len(raw), checksum_tensor(tensor.contiguous())
                    )
                )
                padded = raw + bytes(-len(raw) % 64)
                file.write(padded)
                self.size += len(padded)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def flip(self, offset: int) -> None:
        """Spoil one byte."""
        byte = os.pread(self.fd, 1, offset)[0]
        os.pwrite(self.fd, bytes([byte ^ 1]), offset)

    def __enter__(self) -> Bucket:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


async def publish(engine: Engine, weights: Weights, version: int) -> None:
    """The whole publication of `weights` in two buckets; the engine is READY before and after."""
    names = list(weights)
    half = len(names) // 2
    with (
        Bucket({n: weights[n] for n in names[:half]}) as first,
        Bucket({n: weights[n] for n in names[half:]}) as second,
    ):
        for number, bucket in enumerate((first, second)):
            await engine.stage(bucket.path, bucket.tensors, number, bucket.size)
        await engine.pause()
        await engine.load()
    await engine.verify()
    await engine.commit(version)
    await engine.resume()


def perturbed(weights: Weights, seed: int, scale: float = 0.05) -> Weights:
    """Other weights of the same shapes, different in every tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {name: w + scale * torch.randn(w.shape, generator=generator).to(w.dtype) for name, w in weights.items()}
