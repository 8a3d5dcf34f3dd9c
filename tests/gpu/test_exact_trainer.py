"""The real trainer in exact mode on one GPU: the same bits in every packing, and those of the CPU.

Its half without a GPU is among the tests of `make test-all`.

It needs megatron-core and what else `tools/gpu/wheels.py` lists.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slimx.extras.exact.operations.forward import kernel_cuda

REASON = "megatron-core is not installed; `make gpu-wheels`, where there is a network, collects it for `make gpu`"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason=REASON)
needs_gpu = pytest.mark.skipif(kernel_cuda.missing() is not None, reason=str(kernel_cuda.missing()))
ROOT = Path(__file__).parents[2]
DTYPES = ["float32", "bfloat16"]
SECONDS = 150
Logprobs = Callable[[str, str], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def logprobs(tmp_path_factory: pytest.TempPathFactory) -> Logprobs:
    """`logprobs(kind, dtype)` by packing and rollout; each kind of device is one process."""
    directories: dict[str, Path] = {}

    def of(kind: str, dtype: str) -> dict[str, np.ndarray]:
        if kind not in directories:
            directories[kind] = tmp_path_factory.mktemp(kind)
            command = [sys.executable, "-m", "tests.gpu.exact_rank", kind, str(directories[kind]), *DTYPES]
            environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        with np.load(directories[kind] / f"{dtype}.npz") as found:
            return dict(found)

    return of


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packings_have_the_same_bits(logprobs: Logprobs, kind: str, dtype: str) -> None:
    found = logprobs(kind, dtype)
    names = [name.partition(".")[2] for name in found if name.startswith("narrow.")]
    assert len(names) == 14 and len(found) == 28
    for name in names:
        narrow, wide = (found[f"{packing}.{name}"] for packing in ("narrow", "wide"))
        assert np.isfinite(narrow).all() and narrow.tobytes() == wide.tobytes(), name


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_has_the_bits_of_the_cpu(logprobs: Logprobs, dtype: str) -> None:
    found, expected = logprobs("cuda", dtype), logprobs("cpu", dtype)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name
