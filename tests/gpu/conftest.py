"""Tests that need a GPU: skipped, with the reason, where there is none or the CUDA library was not built.

They import pytest, numpy, torch and the kernels' bindings alone, so that they run on a machine where the rest of slimx
is not installed: `make gpu`. The trainer's do not need the library, but megatron-core, and skip for themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slimx.reshard.kernels import cuda as kernel_cuda

WITHOUT_KERNELS = {"test_trainer.py", "test_exact_trainer.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = kernel_cuda.missing()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents and item.path.name not in WITHOUT_KERNELS:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="package", autouse=True)
def _every_core() -> Iterator[None]:
    """The CPU computes what is expected of the GPU, in sizes that gain from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)
