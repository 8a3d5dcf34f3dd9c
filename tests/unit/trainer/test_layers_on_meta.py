"""Transformer Engine's layers have the names and shapes of the weight table, at the sizes of shipped configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.integration import transformer_engine_stand
from tests.needed import missing

pytestmark = pytest.mark.slow("needs .venv/transformer-engine, imports the whole of it")

GROUPED = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
NORMED = {"TELayerNormColumnParallelLinear"}
OWN = {
    "mimo-7b-sft": NORMED,
    "qwen3-30b-a3b": NORMED | GROUPED,
    "deepseek-v3": NORMED | GROUPED | {"TELinear"},
}
"""Classes of layers by configuration. Mamba-2 layers are not here: they ask for a GPU's generator."""


def test_layers_have_the_weight_tables_names_and_shapes() -> None:
    if not transformer_engine_stand.PACKAGE.is_dir():
        missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
    files = [f"configs/moe/{name}.yaml" for name in OWN]
    command = [sys.executable, "-m", "tests.unit.trainer.layers_on_meta", *files]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-len(OWN) :]
    for own, line in zip(OWN.values(), lines, strict=True):
        kinds: set[str] = set()
        for stage in json.loads(line):
            assert (stage["alone"], stage["shapes"]) == ([], [])
            kinds |= set(stage["kinds"])
        assert kinds >= own | {"TEDotProductAttention"}
        assert not kinds & {"NormColumnParallelLinear", "PackedAttention", "RowParallelLinear"}
