"""One publication whose buckets several ranks fill."""

from __future__ import annotations

from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from slimx.reshard.plan.precision import Precision
from tests.unit.layout.engine_stand import SERVED
from tests.unit.layout.layout_stand import MODELS, Tensors

MODEL, SIZES, ENGINE = MODELS["qwen"], Sizes(data=3), EngineSizes(tensor=2)
WORLD, REMOTE, DEADLINE_S = 3, (2,), 60


def plan(bucket_bytes: int = 8000, sizes: Sizes = SIZES) -> Plan:
    return compile_plan(
        MegatronLayout(MODEL.table, sizes).parts(),
        EngineLayout(SERVED["qwen"].table, ENGINE).parts(),
        precision=Precision("float32", "bfloat16"),
        bucket_bytes=bucket_bytes,
        ranks=ENGINE.world,
    )


def dressed(tensors: Tensors) -> Tensors:
    """Numbers that bf16 has to round."""
    return {name: tensor.float() * 1.0001 for name, tensor in tensors.items()}
