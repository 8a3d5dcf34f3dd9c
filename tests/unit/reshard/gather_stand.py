"""One publication whose buckets several ranks fill."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from slimx.runtime.process import end_with_parent
from tests.unit.layout.engine_stand import SERVED
from tests.unit.layout.layout_stand import MODELS, Tensors

MODEL, SIZES, ENGINE = MODELS["qwen"], Sizes(data=3), EngineSizes(tensor=2)
WORLD, REMOTE, DEADLINE_S = 3, (2,), 300


def plan(bucket_bytes: int = 8000, sizes: Sizes = SIZES) -> Plan:
    return compile_plan(
        MegatronLayout(MODEL.table, sizes).parts(),
        EngineLayout(SERVED["qwen"].table, ENGINE).parts(),
        precision=Precision("float32", "bfloat16"),
        bucket_bytes=bucket_bytes,
        ranks=ENGINE.world,
    )


def run_others(program: Callable[[int], int]) -> None:
    """Run `program` as ranks 1 and 2, in this process and in a fork of it, which has imported torch once; exit with
    their status."""
    parent = os.getpid()
    if not (child := os.fork()):
        end_with_parent(parent)
        sys.exit(program(2))
    code = program(1)
    sys.exit(code or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def dressed(tensors: Tensors) -> Tensors:
    """Numbers that bf16 has to round."""
    return {name: tensor.float() * 1.0001 for name, tensor in tensors.items()}
