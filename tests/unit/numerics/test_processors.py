"""Numerics on lesser processors than this one, as far as libraries can be configured to do without its instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
FILES = [
    *(f"extras/exact/test_{name}.py" for name in ("kernels", "operations", "decoder", "rounding")),
    "unit/reshard/test_kernel_numerics.py",
    "unit/trainer/test_logprobs.py",
]
LESSER = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Variables that limit torch's own kernels, and oneDNN's; ours take every instruction set in turn in these tests."""


@pytest.mark.slow("runs six files of tests again for each processor")
@pytest.mark.parametrize("processor", LESSER)
def test_numerics_hold_with_fewer_instructions(processor):
    files = [str(TESTS / file) for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env={**os.environ, **LESSER[processor]}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout.splitlines()[-1]
