"""What several files of unit tests share: the emulated CUDA device is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cuda_stand import build_emulator


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of csrc/ on emulated threads, behind the CUDA library's interface."""
    return build_emulator(tmp_path_factory.mktemp("emulator"))
