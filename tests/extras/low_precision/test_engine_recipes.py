"""Transformer Engine's Python makes blocks and rule of `trainer.fp8` that slimx rounds by."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slimx.extras.low_precision.recipes import RECIPES
from slimx.extras.low_precision.training import Fp8
from tests.extras.low_precision.engine_recipes import SHAPE
from tests.integration import transformer_engine_stand
from tests.needed import missing

pytestmark = pytest.mark.slow("needs .venv/transformer-engine, imports the whole of it")


def test_quantizers_have_the_blocks_and_the_rule_that_slimx_rounds_by() -> None:
    if not transformer_engine_stand.PACKAGE.is_dir():
        missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
    command = [sys.executable, "-m", "tests.extras.low_precision.engine_recipes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made = json.loads(done.stdout.splitlines()[-1])
    assert made.keys() == RECIPES.keys()
    for name, slots in made.items():
        assert Fp8.TOKENS % slots.pop("align") == 0
        assert {slot["dtype"] for slot in slots.values()} == {"kFloat8E4M3"}
        recipe = RECIPES[name]
        for what, slot in slots.items():
            block = recipe.weight if what == "weight" else recipe.vector
            # Scales by rows and by columns, padded for the product's kernel. A smaller last block has a scale as well.
            rows, cols = SHAPE
            if name == "mxfp8":
                assert (slot["kind"], recipe.rule, block) == ("MXFP8Quantizer", "mxfp8", (1, 32))
                assert slot["scales"] == [[640, 24], [20, 768]]
                continue
            # The rule te: 448 / amax, no least amax, no powers of two.
            assert (slot["kind"], recipe.rule) == ("Float8BlockQuantizer", "te")
            assert (slot["amax_epsilon"], slot["force_pow_2_scales"], slot["block_len"]) == (0.0, False, block[1])
            assert slot["block_scaling_dim"] == (2 if block == (128, 128) else 1)
            assert slot["scales"] == ([[5, 8], [6, 8]] if block == (128, 128) else [[6, rows], [5, cols]])
            assert slot["reads"]
