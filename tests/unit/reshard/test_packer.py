"""Packed buckets hold what torch makes of the trainers' tensors, byte for byte, with the checksums of those bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Copy, IndexMap, RotateHalf
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.parts import Part
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Row, Table, checkpoint_parts
from slimx.models.files.reader import CheckpointReader
from slimx.reshard.pack.packer import Contribution, Packer
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from tests.refusals import refused
from tests.unit.layout.engine_stand import SERVED, engine_rank
from tests.unit.layout.layout_stand import (
    LAYOUTS,
    MODELS,
    Tensors,
    assert_same,
    checkpoint,
    name_of,
    split_of,
    trainer_shards,
)
from tests.unit.reshard.packer_stand import (
    DTYPES,
    HUGE,
    VALUES,
    assert_packed,
    assert_runs_give_the_same,
    is_bias,
    one_thread,
    pack_all,
)


@pytest.fixture(autouse=True)
def single_threaded():
    with one_thread():
        yield


# Any trainer to any engine, in every dtype ----------------------------------------------------------------------------

ENGINES = [
    ("qwen", None),
    ("qwen", EngineSizes(tensor=8, expert=4, redundant=4)),
    ("deepseek", EngineSizes(tensor=4, expert=2, attention_data=2)),
    ("fused", EngineSizes(tensor=2, expert=2, pipeline=2, redundant=2)),
    ("deepseek", None),
]
GRID = pytest.mark.slow("full grid")
DTYPE_PAIRS = [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")]


@pytest.mark.parametrize(
    ("served", "engine", "dtypes", "number"),
    [
        pytest.param(*engine, dtypes, k + 3 * j, marks=[GRID] * ((j - k) % 2))
        for k, engine in enumerate(ENGINES)
        for j, dtypes in enumerate(DTYPE_PAIRS)
    ],
)
def test_buckets_hold_what_torch_makes_of_the_trainers_tensors(served, engine, dtypes, number):
    trainer, engine_dtype = (DTYPES[dtype] for dtype in dtypes)
    model, sizes = SERVED[served].model, LAYOUTS[number % len(LAYOUTS)]
    whole = checkpoint(model)
    if engine is None:
        target, numbered = checkpoint_parts(model.table), [whole]
    else:
        target = EngineLayout(SERVED[served].table, engine).parts()
        numbered = [engine_rank(SERVED[served], whole, engine, rank) for rank in range(engine.world)]
    plan = compile_plan(
        MegatronLayout(model.table, replace(sizes, split=split_of(model, sizes))).parts(),
        target,
        precision=Precision(*dtypes),
        bucket_bytes=[3000, 20_000, HUGE][number % 3],
        ranks=len(numbered),
    )
    trainers = [VALUES.dress(tensors, trainer) for tensors in trainer_shards(model, sizes)]
    expected = [
        {n: (t if is_bias(n) else t.to(engine_dtype)) for n, t in VALUES.dress(tensors, trainer).items()}
        for tensors in numbered
    ]
    assert_packed(plan, trainers, expected)
    if number % 4 == 0:
        assert_runs_give_the_same(plan, trainers)


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Copy(), RotateHalf(6, 4, 1)),
        (RotateHalf(6, 4, 1), Copy()),
        (RotateHalf(6, 6), RotateHalf(12, 8, 2)),
    ],
    ids=str,
)
def test_reordered_tensors_are_packed_in_both_directions(source: IndexMap, target: IndexMap, dtypes):
    trainer, engine_dtype = (DTYPES[dtype] for dtype in dtypes)
    values = torch.randn(24, 10, generator=torch.Generator().manual_seed(2)).to(trainer)

    def cut(map: IndexMap, size: int) -> tuple[list[Part], list[torch.Tensor]]:
        table = Table((Row("local", (("a.weight", (24, 10)),), map, axis=0),), layers=1, experts=0)
        made = {
            Copy(): values,
            RotateHalf(6, 4, 1): rotated(6, 4, 1),
            RotateHalf(6, 6): rotated(6, 6, 0),
            RotateHalf(12, 8, 2): rotated(12, 8, 2),
        }[map]
        parts = MegatronLayout(table, Sizes(tensor=size, expert_tensor=size)).parts()
        return list(parts), [t.contiguous() for t in made.chunk(size)]

    def rotated(head: int, rotary: int, offset: int) -> torch.Tensor:
        before, pairs, after = values.view(-1, head, 10).split([offset, rotary, head - offset - rotary], 1)
        return torch.cat([before, pairs[:, ::2], pairs[:, 1::2], after], 1).reshape(24, 10)

    for here, there in ((1, 2), (2, 1), (2, 2)):
        (source_parts, tensors), (parts, expected) = cut(source, here), cut(target, there)
        plan = compile_plan(source_parts, parts, precision=Precision(*dtypes), bucket_bytes=HUGE, ranks=there)
        trainers = [{"local": tensor} for tensor in tensors]
        assert_packed(plan, trainers, [{"local": tensor.to(engine_dtype)} for tensor in expected])
        assert_runs_give_the_same(plan, trainers)


# Megatron -> Hugging Face -> Megatron ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "number"),
    [
        pytest.param(model, k, marks=[GRID] * ((j - k) % 2), id=f"{name_of(layout)}-{model}")
        for j, model in enumerate(("qwen", "deepseek-mtp"))
        for k, layout in enumerate(LAYOUTS)
    ],
)
def test_a_model_comes_back_bit_for_bit_in_another_layout(tmp_path: Path, model: str, number: int):
    tiny, here, there = MODELS[model], LAYOUTS[number], LAYOUTS[(5 * number + 3) % len(LAYOUTS)]
    plan = compile_plan(
        MegatronLayout(tiny.table, replace(here, split=split_of(tiny, here))).parts(),
        checkpoint_parts(tiny.table),
        precision=Precision("bfloat16", "bfloat16"),
        bucket_bytes=10_000,
    )
    trainers = [VALUES.dress(tensors, torch.bfloat16) for tensors in trainer_shards(tiny, here)]
    saved: Tensors = {}
    for packed, memory in pack_all(plan, trainers):
        for t in packed.tensors:
            saved[t.name] = memory[t.offset : t.offset + t.nbytes].view(DTYPES[t.dtype]).view(t.shape).clone()
    save_file(saved, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    reader.check(tiny.table)
    layout = MegatronLayout(tiny.table, replace(there, split=split_of(tiny, there)))
    for rank, numbered in enumerate(trainer_shards(tiny, there)):
        if rank in (0, there.world // 2, there.world - 1):
            found = {part.name: read(reader, part) for part in layout.parts_of(rank)}
            assert_same(found, VALUES.dress(numbered, torch.bfloat16), f"rank {rank}")


def read(reader: CheckpointReader, part: Part) -> torch.Tensor:
    local = torch.empty(part.shape, dtype=torch.float32 if part.dtype else torch.bfloat16)
    matrix = local.view(-1, 1) if local.dim() == 1 else local
    for rect in part.rects:
        place = matrix[rect.local_row : rect.local_row + rect.rows, rect.local_col : rect.local_col + rect.cols]
        place.copy_(reader.read(part.sources[rect.source], rect))
    return local


# Refusals -------------------------------------------------------------------------------------------------------------

NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


def qwen_plan(precision: Precision) -> Plan:
    table = MODELS["qwen"].table
    parts = MegatronLayout(table, Sizes()).parts()
    return compile_plan(parts, checkpoint_parts(table), precision=precision, bucket_bytes=HUGE)


def parameters(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return VALUES.dress(trainer_shards(MODELS["qwen"], Sizes())[0], dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "precision",
    [
        Precision("bfloat16", "bfloat16"),
        Precision("float32", "float32"),
        Precision("float32", "bfloat16"),
        Precision("bfloat16", "float32"),
        Precision("bfloat16", "bfloat16", quantization("ieee", (2, 4))),
        Precision("float32", "bfloat16", quantization("mxfp8", (1, 32))),
    ],
    ids=str,
)
def test_a_weight_that_is_not_finite_is_refused_by_name(precision: Precision, value: float):
    tensors = parameters(DTYPES[precision.trainer])
    tensors["decoder.layers.1.mlp.experts.linear_fc1.weight2"][27, 3] = value
    with refused("kernel.nonfinite", about=NAME):
        list(pack_all(qwen_plan(precision), [tensors]))


def test_a_weight_too_large_for_bf16_is_refused_by_name():
    tensors = parameters(torch.float32)
    tensors["decoder.layers.1.mlp.experts.linear_fc1.weight2"][27, 3] = 3.4e38
    with refused("kernel.nonfinite", about=NAME):
        list(pack_all(qwen_plan(Precision("float32", "bfloat16")), [tensors]))
    list(pack_all(qwen_plan(Precision("float32", "float32")), [tensors]))


FC1 = "decoder.layers.0.mlp.experts.linear_fc1.weight0"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: None, "pack.no_parameter"),
        (lambda t: t.float(), "pack.parameter"),
        (lambda t: t.view(12, 40), "pack.parameter"),
        (lambda t: t.view(-1), "pack.parameter"),
        (lambda t: t.T.contiguous().T, "pack.parameter"),
    ],
    ids=["missing", "dtype", "shape", "flat", "strides"],
)
def test_a_parameter_that_differs_from_the_plan_is_refused(change: Callable, code: str):
    tensors = parameters()
    if (changed := change(tensors.pop(FC1))) is not None:
        tensors[FC1] = changed
    with refused(code, about=FC1):
        list(pack_all(qwen_plan(Precision("bfloat16", "bfloat16")), [tensors]))


def test_parameters_are_read_anew_at_every_publication():
    plan, tensors = qwen_plan(Precision("bfloat16", "bfloat16")), parameters()
    packer = Packer(plan, 0, tensors)
    first, second = (torch.zeros(packer.form(0).size, dtype=torch.uint8) for _ in range(2))
    before = packer.pack(0, first)
    for tensor in tensors.values():
        tensor.mul_(-2)
    after = packer.pack(0, second)
    signs = second.view(torch.bfloat16) == first.view(torch.bfloat16) * -2
    assert signs.all() and not np.array_equal(before.sums, after.sums)


def test_a_parameter_that_moves_between_publications_is_refused():
    plan, tensors = qwen_plan(Precision("bfloat16", "bfloat16")), parameters()
    packer = Packer(plan, 0, tensors)
    memory = torch.zeros(packer.form(0).size, dtype=torch.uint8)
    packer.pack(0, memory)
    tensors[FC1].data = tensors[FC1].clone()
    with refused("pack.moved", about=FC1):
        packer.pack(0, memory)


def test_a_rank_that_brings_nothing_to_a_bucket_adds_nothing():
    plan = qwen_plan(Precision("bfloat16", "bfloat16"))
    idle = Packer(plan, 3, {})
    memory = torch.zeros(idle.form(0).size, dtype=torch.uint8)
    share: Contribution = idle.pack(0, memory)
    run, _ = idle.pack_run(0)
    assert not share.sums.any() and not share.flags.any() and not memory.any() and len(run) == 0
