"""Block quantization in a plan: codes and scales have their places, and a shard inside a block is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slimx.extras.families import deepseek_v3
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Blocks, Copy, IndexMap, RotateHalf
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.parts import Part
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Row, Table, checkpoint_parts
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from tests.refusals import numbers, refused
from tests.unit.layout.layout_stand import DEEPSEEK

BLOCKS = {(128, 128): "ieee", (1, 32): "mxfp8", (4, 8): "te"}
HF = DEEPSEEK | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "kv_lora_rank": 128,
    "q_lora_rank": 384,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 64,
    "num_hidden_layers": 2,
}
"""Dimensions of whole blocks for two ranks: heads of 256 rows, and of 64 columns in the output projection."""
NARROW = {"v_head_dim": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
"""Two heads have whole blocks of rows everywhere, but 192 columns in the output projection."""


def precision(block: tuple[int, int]) -> Precision:
    return Precision("bfloat16", "bfloat16", quantization(BLOCKS[block], block))


def v3_like(
    source: Sizes, target: EngineSizes | None, block: tuple[int, int] = (128, 128), bucket_bytes: int = 2**40, **hf: Any
) -> Plan:
    fields = HF | hf
    table = deepseek_v3.weight_table(fields)
    parts = checkpoint_parts(table)
    if target is not None:
        parts = EngineLayout(deepseek_v3.engine_table(fields), target).parts()
    return compile_plan(
        MegatronLayout(table, source).parts(),
        parts,
        precision=precision(block),
        bucket_bytes=bucket_bytes,
        ranks=target.world if target else 1,
    )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("engine", [None, EngineSizes(tensor=2), EngineSizes(tensor=2, expert=2, attention_data=2)])
def test_every_quantized_tensor_is_followed_by_its_scales(engine: EngineSizes | None, block: tuple[int, int]):
    plan = v3_like(Sizes(tensor=2, data=2, expert=2), engine, block, bucket_bytes=100_000)
    (high, wide), seen = block, 0
    for bucket in (bucket for buckets in plan.buckets for bucket in buckets):
        assert bucket.size <= 100_000 or len(bucket.tensors) <= 2
        for k, t in enumerate(bucket.tensors):
            plain = any(word in t.name for word in ("norm", "gate.weight", "bias", "lm_head", "embed_tokens"))
            if t.scale_of >= 0:
                codes = bucket.tensors[t.scale_of]
                *stack, rows, cols = codes.shape
                assert t.scale_of == k - 1 and t.name == codes.name + "_scale_inv"
                assert t.shape == (*stack, -(-rows // high), -(-cols // wide))
                assert t.dtype == ("uint8" if BLOCKS[block] == "mxfp8" else "float32")
                seen += 1
            elif plain:
                assert t.dtype == ("float32" if "bias" in t.name else "bfloat16")
            else:
                assert t.dtype == "float8_e4m3fn" and bucket.tensors[k + 1].scale_of == k, t.name
    assert seen > 20
    moved = plan.moved
    scales = {
        (target, b, k)
        for target, buckets in enumerate(plan.buckets)
        for b, bucket in enumerate(buckets)
        for k, t in enumerate(bucket.tensors)
        if t.scale_of >= 0
    }
    assert not scales & set(zip(*(moved[c].tolist() for c in ("target", "bucket", "tensor")), strict=True))


@pytest.mark.parametrize(
    ("source", "target", "hf", "tensor", "shard"),
    [
        # Source ranks that cut a block of the checkpoint's tensor.
        (Sizes(tensor=2), None, {"intermediate_size": 320}, "layers.0.mlp.gate_proj", (160, 256, 0, 0)),
        (Sizes(expert_tensor=4, data=4), None, {}, "experts.0.gate_proj", (64, 256, 0, 0)),
        (Sizes(tensor=4), None, {}, "self_attn.o_proj", (256, 64, 0, 0)),
        # Target ranks that do.
        (Sizes(), EngineSizes(tensor=2), {"intermediate_size": 320}, "mlp.up_proj", (160, 256, 0, 0)),
        (Sizes(), EngineSizes(tensor=4), {}, "self_attn.o_proj", (256, 64, 0, 64)),
        # A shard of the target whose own blocks are whole, but not those of the checkpoint.
        (Sizes(), EngineSizes(tensor=2), NARROW, "self_attn.o_proj", (256, 192, 0, 192)),
        # Gate and up in one tensor of the target: up would begin inside a block.
        (Sizes(), EngineSizes(), {"moe_intermediate_size": 192}, "experts.0.up_proj", (192, 256, 0, 0)),
    ],
    ids=str,
)
def test_a_shard_inside_a_block_is_refused_by_name_with_its_numbers(source, target, hf, tensor, shard):
    """`shard`: rows, columns, first row and first column."""
    with refused("plan.blocks") as caught:
        v3_like(source, target, **hf)
    assert caught.value.about.startswith("model.layers.") and caught.value.about.endswith(f"{tensor}.weight")
    assert numbers(str(caught.value).partition(caught.value.about)[2]) == [*shard, 128, 128, 128]


def test_a_block_that_only_the_edge_of_its_tensor_cuts_is_allowed():
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows: four blocks and a half, behind q_a_proj in one engine tensor."""
    plan = v3_like(Sizes(), EngineSizes())
    (fused, scales) = [
        t for t in plan.buckets[0][0].tensors if t.name.startswith("model.layers.0.self_attn.fused_qkv_a_proj")
    ]
    assert fused.shape == (384 + 128 + 64, 256) and scales.shape == (5, 2)


def test_the_same_shards_travel_unquantized():
    table = deepseek_v3.weight_table(HF | {"moe_intermediate_size": 192})
    parts = MegatronLayout(table, Sizes(data=4, expert_tensor=4)).parts()
    compile_plan(
        parts, checkpoint_parts(table), precision=replace(precision((4, 8)), quantization=None), bucket_bytes=1
    )


@pytest.mark.parametrize("side", ["source", "target", "both"])
def test_a_tensor_that_is_reordered_is_refused_by_name(side: str):
    def parts(map: IndexMap) -> list[Part]:
        row = Row("local", (("a.weight", (256, 256)),), map, quantized=True)
        return list(MegatronLayout(Table((row,), layers=1, experts=0), Sizes()).parts())

    source, target = (parts(RotateHalf(128, 64) if side in (end, "both") else Copy()) for end in ("source", "target"))
    with refused("plan.reordered", about="a.weight"):
        compile_plan(source, target, precision=precision((128, 128)), bucket_bytes=1)


def test_heads_that_many_engine_ranks_repeat_have_whole_blocks_each():
    row = Row("qkv", (("q", (1024, 128)), ("k", (256, 128))), Blocks((8, 2)), axis=0, quantized=True)
    table = Table((row,), layers=1, experts=0)
    source = MegatronLayout(replace(table, rows=(replace(row, axis=None),)), Sizes()).parts()
    target = EngineLayout(table, EngineSizes(tensor=8)).parts()
    plan = compile_plan(source, target, precision=precision((128, 128)), bucket_bytes=1, ranks=8)
    assert [t.shape for t in plan.buckets[7][0].tensors] == [(256, 128), (2, 1)]
