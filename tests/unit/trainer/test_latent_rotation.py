"""The fused rotation of queries and keys: the models that have one, and what it computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimx.models.families import read_model
from slimx.trainer.model.transformer import fused_rotation

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ("DeepSeek-V3", True),
        ("Kimi-K2-Instruct", True),
        ("DeepSeek-V3.2", False),
        ("GLM-5", False),
        ("Qwen3-30B-A3B", True),
        ("gpt-oss-120b-bf16", False),
    ],
)
def test_rotation_is_fused_where_a_kernel_computes_it(model: str, fused: bool) -> None:
    assert fused_rotation(read_model(ROOT / "configs" / "moe" / "models" / model)) is fused


@pytest.mark.slow("a process that imports megatron-core")
def test_the_fused_latent_rotation_equals_the_plain_one_bit_for_bit() -> None:
    """Packed sequences, alone and as both ranks of context parallelism; also where the query is written in place."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.trainer.latent_rotation"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == 3 and all(len(each) == 6 for each in found.values())
    assert {difference for each in found.values() for difference in each} == {0.0}, found
