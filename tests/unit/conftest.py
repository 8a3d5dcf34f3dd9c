"""What several files of unit tests share: the emulated CUDA device is compiled once; hooks are written as modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cuda_stand import build_emulator


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of csrc/ on emulated threads, behind the CUDA library's interface."""
    return build_emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Writes a module of the test's own; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"own_module_{abs(hash((request.node.name, text)))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write
