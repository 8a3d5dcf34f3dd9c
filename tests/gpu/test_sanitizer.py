"""compute-sanitizer finds nothing: no access outside an allocation, no race in shared memory, no barrier misused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 90


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer_is_clean(tool: str) -> None:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    # Without torch's cache every tensor is an allocation of its own, whose bounds memcheck knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, "-m", "tests.gpu.sanitized"]
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer --tool {tool} did not end within {SECONDS} s")
    output = run.stdout + run.stderr
    if "not supported" in output or "Unable to" in output:
        pytest.skip(f"compute-sanitizer cannot watch this machine's device: {output.strip().splitlines()[-1]}")
    assert run.returncode == 0 and "all plans are equal" in output, output[-4000:]
