"""Rules of fp8 have their own blocks."""

from __future__ import annotations

import pytest

from slimx.extras.low_precision.block_fp8 import quantization
from tests.refusals import refused


@pytest.mark.parametrize(
    ("rule", "block"), [("mxfp8", (128, 128)), ("mxfp8", (32, 1)), ("triton", (1, 32)), ("int4", (128, 128))]
)
def test_a_quantization_rule_of_foreign_blocks_is_refused(rule: str, block: tuple[int, int]):
    with refused("plan.rule", about=rule):
        quantization(rule, block)
