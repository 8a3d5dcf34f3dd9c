"""Quantized buckets hold the codes and scales of the reference, whichever rank quantized which block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slimx.extras.direct.wire import wire_bytes
from slimx.extras.families import deepseek_v3
from slimx.extras.low_precision import int4
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision, Quantization
from slimx.layout.parts import Part
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Row, Table, checkpoint_parts
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.plan.copy_plan import compile_plan
from tests import reshard_reference as reference
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import (
    Model,
    Tensors,
    checkpoint,
    trainer_shards,
)
from tests.unit.reshard.packer_stand import (
    DTYPES,
    HUGE,
    WIDE,
    Values,
    assert_packed,
    assert_runs_give_the_same,
    is_bias,
    one_thread,
)


@pytest.fixture(autouse=True)
def single_threaded():
    with one_thread():
        yield


def quantized(tensors: Tensors, parts: dict[str, Part], rule: Quantization, block: tuple[int, int]) -> Tensors:
    """Computes codes and scales by the reference, each matrix of a stack on its own."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not parts[name].quantized:
            out[name] = tensor if is_bias(name) else tensor.bfloat16()
            continue
        matrices = tensor.flatten(0, -3).unbind(0) if tensor.dim() == 3 else [tensor]
        if rule.rule == "int4":
            made, suffixes = [reference.quantize_int4(m) for m in matrices], ("_packed", "_scale")
        else:
            made = [reference.quantize(m, kernel.RULE[rule.rule.upper()], block) for m in matrices]
            suffixes = "", "_scale_inv"
        for suffix, values in zip(suffixes, zip(*made, strict=True), strict=True):
            out[name + suffix] = torch.stack(values) if tensor.dim() == 3 else values[0]
    return out


@pytest.mark.parametrize("trainer", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("rule", "block"),
    [("ieee", (128, 128)), ("te", (128, 128)), ("ue8m0", (128, 128)), ("mxfp8", (1, 32)), ("ieee", (16, 64))],
)
@pytest.mark.parametrize("engine", [None, EngineSizes(tensor=2, expert=2)], ids=["hf", "local"])
def test_quantized_buckets_hold_the_references_codes_and_scales(rule: Any, block, engine, trainer: str):
    model = Model(WIDE, deepseek_v3.weight_table(WIDE))
    served = replace(SERVED["deepseek"], model=model, table=deepseek_v3.engine_table(WIDE))
    sizes = Sizes(tensor=2, pipeline=2, data=2, expert=2)
    whole = checkpoint(model)
    if engine is None:
        parts, numbered = list(checkpoint_parts(model.table)), [whole]
    else:
        parts = list(EngineLayout(served.table, engine).parts())
        numbered = [engine_rank(served, whole, engine, rank) for rank in range(engine.world)]
    how = quantization(rule, block)
    plan = compile_plan(
        MegatronLayout(model.table, sizes).parts(),
        parts,
        precision=Precision(trainer, "bfloat16", how),
        bucket_bytes=300_000,
        ranks=len(numbered),
    )
    values, dtype = Values(1 + max(int(t.max()) for t in whole.values())), DTYPES[trainer]
    trainers = [values.dress(tensors, dtype) for tensors in trainer_shards(model, sizes)]
    by_name = {part.name: part for part in parts}
    expected = [quantized(values.dress(tensors, dtype), by_name, how, block) for tensors in numbered]
    assert_packed(plan, trainers, expected)
    if rule == "te":
        assert_runs_give_the_same(plan, trainers)


@pytest.mark.parametrize("trainer", ["bfloat16", "float32"])
@pytest.mark.parametrize("engine", [EngineSizes(), EngineSizes(tensor=4, expert=2)], ids=["whole", "TP4xEP2"])
def test_int4_buckets_have_the_references_codes_and_scales(engine: EngineSizes, trainer: str):
    model = Model(WIDE, deepseek_v3.weight_table(WIDE))
    table = int4.FORMAT.chosen(deepseek_v3.engine_table(WIDE))
    served, sizes = replace(SERVED["deepseek"], model=model, table=table), Sizes(tensor=2, expert=2, data=2)
    whole, parts = checkpoint(model), list(EngineLayout(table, engine).parts())
    plan = compile_plan(
        MegatronLayout(model.table, sizes).parts(),
        parts,
        precision=Precision(trainer, "bfloat16", how := int4.QUANTIZATION),
        bucket_bytes=300_000,
        ranks=engine.world,
    )
    values = Values(1 + max(int(t.max()) for t in whole.values()))
    trainers = [values.dress(tensors, DTYPES[trainer]) for tensors in trainer_shards(model, sizes)]
    by_name = {part.name: part for part in parts}
    assert {part.name.rpartition(".")[2] for part in parts if part.quantized} == {"w13_weight", "w2_weight"}
    numbered = [engine_rank(served, whole, engine, rank) for rank in range(engine.world)]
    dressed = [values.dress(tensors, DTYPES[trainer]) for tensors in numbered]
    assert_packed(plan, trainers, [quantized(tensors, by_name, how, how.block) for tensors in dressed])
    assert_runs_give_the_same(plan, trainers)
    received = wire_bytes(plan).received(plan.targets)
    assert received.tolist() == [sum(t.nbytes for b in target for t in b.tensors) for target in plan.buckets]


@pytest.mark.parametrize(("rule", "block"), [("te", (4, 8)), ("mxfp8", (1, 32))])
def test_odd_shapes_with_cut_blocks_travel_in_runs_too(rule: Any, block):
    """Codes of 35 bytes before fp32 scales and bf16 values: each must stand where its kernel can write it."""
    rows = tuple(
        Row(f"{name}{k}", ((f"{name}{k}", shape),), quantized=name == "q", dtype="float32" if name == "f" else None)
        for k, (name, shape) in enumerate([("q", (5, 7)), ("p", (3, 5)), ("q", (9, 11)), ("f", (3,)), ("q", (1, 1))])
    )
    table = Table(rows, layers=1, experts=0)
    plan = compile_plan(
        MegatronLayout(table, Sizes()).parts(),
        parts := list(checkpoint_parts(table)),
        precision=Precision("bfloat16", "bfloat16", how := quantization(rule, block)),
        bucket_bytes=HUGE,
    )
    generator = torch.Generator().manual_seed(3)
    weights = {
        row.name: torch.randn(row.sources[0][1], generator=generator).to(DTYPES[row.dtype or "bfloat16"])
        for row in rows
    }
    by_name = {part.name: part for part in parts}
    expected = {n: quantized({n: t}, by_name, how, block) if t.dim() == 2 else {n: t} for n, t in weights.items()}
    assert_packed(plan, [weights], [{k: t for tensors in expected.values() for k, t in tensors.items()}])
    assert_runs_give_the_same(plan, [weights])
