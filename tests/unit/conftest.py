"""Fixtures that several files of unit tests share: the emulated CUDA device, two checkpoints, each made once, and hooks
that are written as modules."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slimx.adapters.transformers import import_transformers
from tests.checkpoint_stand import DEEPSEEK_V3, QWEN3_MOE, write_checkpoint
from tests.unit.reshard.cuda_stand import emulator

import_transformers()  # which saves a second of each process that collects tests


@pytest.fixture(scope="session")
def emulator_library() -> Path:
    """Returns the kernels of csrc/ on emulated threads, behind the CUDA library's interface."""
    return emulator()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Writes a module of the test's own; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"own_module_{abs(hash((request.node.name, text)))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Qwen3-MoE checkpoint in several files; no test writes into it."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "qwen", QWEN3_MOE, file_bytes=100_000)


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a DeepSeek-V3 checkpoint with a layer of multi-token prediction; no test writes into it."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "deepseek", DEEPSEEK_V3, file_bytes=100_000)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Garbage waits while a test measures CPU time: a collection looks at every object of pytest's process, 0.1 s."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def unawaited(recwarn: pytest.WarningsRecorder) -> Callable[[], list[str]]:
    """Returns a function that lists the coroutines that this test has left without an `await`."""
    gc.collect()  # garbage of other tests may warn, too
    recwarn.clear()

    def found() -> list[str]:
        gc.collect()
        return [str(one.message) for one in recwarn.list if "was never awaited" in str(one.message)]

    return found
