"""Packed buckets hold what torch makes of the trainers' tensors, byte for byte, with the checksums of those bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slimx.errors import SlimxError
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Copy, IndexMap, RotateHalf, Transpose
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Row, Table
from slimx.models import deepseek_v3
from slimx.models.checkpoint_reader import CheckpointReader
from slimx.reshard import kernel, reference
from slimx.reshard.packed import PackedBucket
from slimx.reshard.packer import Packer, Share, describe
from slimx.reshard.pieces import compact, pieces_of, spread
from slimx.reshard.plan import Plan, checkpoint_parts, compile_plan
from slimx.reshard.precision import Precision, Quantisation
from tests.unit.engine_stand import SERVED, engine_rank
from tests.unit.layout_stand import (
    LAYOUTS,
    MODELS,
    Model,
    Tensors,
    assert_same,
    checkpoint,
    held_by_trainers,
    name_of,
    split_of,
)

HUGE = 2**40
Dtype = Any
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8, "float8_e4m3fn": torch.uint8}


class Values:
    """A number for every element of a numbered checkpoint; element 0 is the padding's 0."""

    def __init__(self, count: int = 200_000):
        self._values = torch.randn(count, generator=torch.Generator().manual_seed(1))
        self._values[0] = 0

    def dress(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """Router biases are fp32 in every model."""
        return {n: self._values[t].to(torch.float32 if is_bias(n) else dtype) for n, t in tensors.items()}


def is_bias(name: str) -> bool:
    return name.endswith(("expert_bias", "e_score_correction_bias"))


VALUES = Values()


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of tiny buckets: waking a second thread for each costs more than packing it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pack_all(plan: Plan, trainers: list[Tensors]) -> Iterable[tuple[PackedBucket, torch.Tensor]]:
    """All ranks into one memory, bucket by bucket."""
    packers = [Packer(plan, rank, held) for rank, held in enumerate(trainers)]
    for bucket in range(plan.count):
        form = packers[0].form(bucket)
        memory = torch.zeros(form.size, dtype=torch.uint8)
        yield describe(form, "/a/path", [packer.pack(bucket, memory) for packer in packers]), memory


def assert_packed(plan: Plan, trainers: list[Tensors], expected: list[Tensors]) -> None:
    """Every byte of every bucket: tensors where they are said to be, zero between them, with their checksums."""
    seen: list[dict[str, torch.Tensor]] = [{} for _ in expected]
    for packed, memory in pack_all(plan, trainers):
        left = memory.clone()
        assert packed.size == len(memory) and packed.path == "/a/path" and len(packed.targets) == plan.targets
        for target, tensors in enumerate(packed.targets):
            assert not tensors or tensors[0].offset % 4096 == 0, "an engine rank maps its own pages"
            for t in tensors:
                raw = memory[t.offset : t.offset + t.nbytes]
                wanted = expected[target][t.name]
                assert raw.view(DTYPES[t.dtype]).view(t.shape).equal(wanted), t.name
                assert t.checksum == reference.checksum(wanted), t.name
                left[t.offset : t.offset + t.nbytes] = 0
                seen[target][t.name] = raw
        assert not left.any(), "something is written beside the tensors"
    assert [tensors.keys() for tensors in seen] == [tensors.keys() for tensors in expected]


def assert_runs_give_the_same(plan: Plan, trainers: list[Tensors]) -> None:
    """What a remote rank sends in one run lands where it would have written itself."""
    for bucket, (_, memory) in enumerate(pack_all(plan, trainers)):
        again = torch.zeros_like(memory)
        for rank, held in enumerate(trainers):
            packer = Packer(plan, rank, held)
            form = packer.form(bucket)
            run, share = packer.pack_run(bucket)
            pieces = pieces_of(plan, plan.moves_of(rank, bucket), form, None)
            assert compact(pieces)[1] == len(run)
            kernel.pack(spread(pieces, run), again, np.zeros(1, np.uint64))
            own = packer.pack(bucket, torch.zeros_like(memory))
            assert np.array_equal(own.sums, share.sums) and np.array_equal(own.flags, share.flags)
        assert again.equal(memory)


# Any trainer to any engine, in every dtype ----------------------------------------------------------------------------

ENGINES = [
    ("qwen", None),
    ("qwen", EngineSizes(tensor=8, expert=4, redundant=4)),
    ("deepseek", EngineSizes(tensor=4, expert=2, attention_data=2)),
    ("fused", EngineSizes(tensor=2, expert=2, pipeline=2, redundant=2)),
    ("draft", EngineSizes(tensor=2)),
    ("deepseek", None),
]
DTYPE_PAIRS = [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")]


@pytest.mark.parametrize(
    ("served", "engine", "dtypes", "number"),
    [(*engine, dtypes, k + 3 * j) for k, engine in enumerate(ENGINES) for j, dtypes in enumerate(DTYPE_PAIRS)],
)
def test_buckets_hold_what_torch_makes_of_the_trainers_tensors(served, engine, dtypes, number):
    trainer, wanted = (DTYPES[dtype] for dtype in dtypes)
    model, sizes = SERVED[served].model, LAYOUTS[number % len(LAYOUTS)]
    whole = checkpoint(model)
    if engine is None:
        target, numbered = checkpoint_parts(model.table), [whole]
    else:
        target = EngineLayout(SERVED[served].table, engine).parts()
        numbered = [engine_rank(SERVED[served], whole, engine, rank) for rank in range(engine.world)]
    plan = compile_plan(
        MegatronLayout(model.table, sizes, split_of(model, sizes)).parts(),
        target,
        precision=Precision(*dtypes),
        bucket_bytes=[3000, 20_000, HUGE][number % 3],
        ranks=len(numbered),
    )
    trainers = [VALUES.dress(tensors, trainer) for tensors in held_by_trainers(model, sizes)]
    expected = [
        {n: (t if is_bias(n) else t.to(wanted)) for n, t in VALUES.dress(tensors, trainer).items()}
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
        (Copy(), Transpose()),
        (Transpose(), Copy()),
        (Transpose(), Transpose()),
    ],
    ids=str,
)
def test_reordered_and_transposed_tensors_are_packed_in_both_directions(source: IndexMap, target: IndexMap, dtypes):
    trainer, wanted = (DTYPES[dtype] for dtype in dtypes)
    values = torch.randn(24, 10, generator=torch.Generator().manual_seed(2)).to(trainer)

    def cut(map: IndexMap, size: int) -> tuple[list[Part], list[torch.Tensor]]:
        table = Table((Row("local", (("a.weight", (24, 10)),), map, axis=0),), layers=1, experts=0)
        made = {
            Copy(): values,
            Transpose(): values.T,
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
        (held, tensors), (parts, expected) = cut(source, here), cut(target, there)
        plan = compile_plan(held, parts, precision=Precision(*dtypes), bucket_bytes=HUGE, ranks=there)
        trainers = [{"local": tensor} for tensor in tensors]
        assert_packed(plan, trainers, [{"local": tensor.to(wanted)} for tensor in expected])
        assert_runs_give_the_same(plan, trainers)


# Block quantisation ---------------------------------------------------------------------------------------------------

WIDE = MODELS["deepseek"].hf | {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
"""Dimensions of whole blocks of 128 for two ranks; kv_b_proj ends with half a block of columns."""


def quantised(tensors: Tensors, parts: dict[str, Part], rule: Quantisation, block: tuple[int, int]) -> Tensors:
    """Codes and scales by the reference, each matrix of a stack on its own."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not parts[name].quantised:
            out[name] = tensor if is_bias(name) else tensor.bfloat16()
            continue
        made = (
            [reference.quantise(m, kernel.RULE[rule.rule.upper()], block) for m in tensor.flatten(0, -3).unbind(0)]
            if (tensor.dim() == 3)
            else [reference.quantise(tensor, kernel.RULE[rule.rule.upper()], block)]
        )
        codes, scales = (torch.stack(each) if tensor.dim() == 3 else each[0] for each in zip(*made, strict=True))
        out[name], out[name + "_scale_inv"] = codes, scales
    return out


@pytest.mark.parametrize("trainer", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("rule", "block"),
    [("ieee", (128, 128)), ("te", (128, 128)), ("ue8m0", (128, 128)), ("mxfp8", (1, 32)), ("ieee", (16, 64))],
)
@pytest.mark.parametrize("engine", [None, EngineSizes(tensor=2, expert=2)], ids=["hf", "local"])
def test_quantised_buckets_hold_the_references_codes_and_scales(rule: Any, block, engine, trainer: str):
    model = Model(WIDE, deepseek_v3.weight_table(WIDE))
    served = replace(SERVED["deepseek"], model=model, table=deepseek_v3.engine_table(WIDE))
    sizes = Sizes(tensor=2, pipeline=2, data=2, expert=2)
    whole = checkpoint(model)
    if engine is None:
        parts, numbered = list(checkpoint_parts(model.table)), [whole]
    else:
        parts = list(EngineLayout(served.table, engine).parts())
        numbered = [engine_rank(served, whole, engine, rank) for rank in range(engine.world)]
    how = Quantisation(rule, block)
    plan = compile_plan(
        MegatronLayout(model.table, sizes).parts(),
        parts,
        precision=Precision(trainer, "bfloat16", how),
        bucket_bytes=300_000,
        ranks=len(numbered),
    )
    values, dtype = Values(1 + max(int(t.max()) for t in whole.values())), DTYPES[trainer]
    trainers = [values.dress(tensors, dtype) for tensors in held_by_trainers(model, sizes)]
    by_name = {part.name: part for part in parts}
    expected = [quantised(values.dress(tensors, dtype), by_name, how, block) for tensors in numbered]
    assert_packed(plan, trainers, expected)
    if rule == "te":
        assert_runs_give_the_same(plan, trainers)


@pytest.mark.parametrize(("rule", "block"), [("te", (4, 8)), ("mxfp8", (1, 32))])
def test_odd_shapes_with_cut_blocks_travel_in_runs_too(rule: Any, block):
    """Codes of 35 bytes before fp32 scales and bf16 values: each must stand where its kernel can write it."""
    rows = tuple(
        Row(f"{name}{k}", ((f"{name}{k}", shape),), quantised=name == "q", dtype="float32" if name == "f" else None)
        for k, (name, shape) in enumerate([("q", (5, 7)), ("p", (3, 5)), ("q", (9, 11)), ("f", (3,)), ("q", (1, 1))])
    )
    table = Table(rows, layers=1, experts=0)
    plan = compile_plan(
        MegatronLayout(table, Sizes()).parts(),
        parts := list(checkpoint_parts(table)),
        precision=Precision("bfloat16", "bfloat16", how := Quantisation(rule, block)),
        bucket_bytes=HUGE,
    )
    generator = torch.Generator().manual_seed(3)
    held = {
        row.name: torch.randn(row.sources[0][1], generator=generator).to(DTYPES[row.dtype or "bfloat16"])
        for row in rows
    }
    by_name = {part.name: part for part in parts}
    expected = {n: quantised({n: t}, by_name, how, block) if t.dim() == 2 else {n: t} for n, t in held.items()}
    assert_packed(plan, [held], [{k: t for tensors in expected.values() for k, t in tensors.items()}])
    assert_runs_give_the_same(plan, [held])


# Megatron -> Hugging Face -> Megatron ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen", "deepseek-mtp"])
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda k: name_of(LAYOUTS[k]))
def test_a_model_comes_back_bit_for_bit_in_another_layout(tmp_path: Path, model: str, number: int):
    tiny, here, there = MODELS[model], LAYOUTS[number], LAYOUTS[(5 * number + 3) % len(LAYOUTS)]
    plan = compile_plan(
        MegatronLayout(tiny.table, here, split_of(tiny, here)).parts(),
        checkpoint_parts(tiny.table),
        precision=Precision("bfloat16", "bfloat16"),
        bucket_bytes=10_000,
    )
    trainers = [VALUES.dress(tensors, torch.bfloat16) for tensors in held_by_trainers(tiny, here)]
    saved: Tensors = {}
    for packed, memory in pack_all(plan, trainers):
        for t in packed.tensors:
            saved[t.name] = memory[t.offset : t.offset + t.nbytes].view(DTYPES[t.dtype]).view(t.shape).clone()
    save_file(saved, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    reader.check(tiny.table)
    layout = MegatronLayout(tiny.table, there, split_of(tiny, there))
    for rank, numbered in enumerate(held_by_trainers(tiny, there)):
        if rank in (0, there.world // 2, there.world - 1):
            found = {part.name: read(reader, part) for part in layout.held(rank)}
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


def held(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return VALUES.dress(held_by_trainers(MODELS["qwen"], Sizes())[0], dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "precision",
    [
        Precision("bfloat16", "bfloat16"),
        Precision("float32", "float32"),
        Precision("float32", "bfloat16"),
        Precision("bfloat16", "float32"),
        Precision("bfloat16", "bfloat16", Quantisation("ieee", (2, 4))),
        Precision("float32", "bfloat16", Quantisation("mxfp8", (1, 32))),
    ],
    ids=str,
)
def test_a_weight_that_is_not_finite_is_refused_by_name(precision: Precision, value: float):
    tensors = held(DTYPES[precision.trainer])
    tensors["decoder.layers.1.mlp.experts.linear_fc1.weight2"][27, 3] = value
    with pytest.raises(SlimxError, match=rf"{NAME} holds a value that is infinite or not a number.*1 such tensors?"):
        list(pack_all(qwen_plan(precision), [tensors]))


def test_a_weight_too_large_for_bf16_is_refused_by_name():
    tensors = held(torch.float32)
    tensors["decoder.layers.1.mlp.experts.linear_fc1.weight2"][27, 3] = 3.4e38
    with pytest.raises(SlimxError, match=NAME):
        list(pack_all(qwen_plan(Precision("float32", "bfloat16")), [tensors]))
    list(pack_all(qwen_plan(Precision("float32", "float32")), [tensors]))


FC1 = "decoder.layers.0.mlp.experts.linear_fc1.weight0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: None, rf"this rank has no parameter {FC1}, which the plan reads"),
        (lambda t: t.float(), rf"parameter {FC1} is float32 \[40, 12\]; the plan was compiled for bfloat16 \[40, 12\]"),
        (lambda t: t.view(12, 40), rf"parameter {FC1} is bfloat16 \[12, 40\]; the plan was compiled for .*\[40, 12\]"),
        (lambda t: t.view(-1), rf"parameter {FC1} is bfloat16 \[480\]"),
        (lambda t: t.T.contiguous().T, rf"parameter {FC1} is bfloat16 \[40, 12\], not contiguous"),
    ],
    ids=["missing", "dtype", "shape", "flat", "strides"],
)
def test_a_parameter_that_is_not_what_the_plan_was_made_for_is_refused_by_name(change: Callable, words: str):
    tensors = held()
    if (changed := change(tensors.pop(FC1))) is not None:
        tensors[FC1] = changed
    with pytest.raises(SlimxError, match=words):
        list(pack_all(qwen_plan(Precision("bfloat16", "bfloat16")), [tensors]))


def test_parameters_are_read_anew_at_every_publication():
    plan, tensors = qwen_plan(Precision("bfloat16", "bfloat16")), held()
    packer = Packer(plan, 0, tensors)
    first, second = (torch.zeros(packer.form(0).size, dtype=torch.uint8) for _ in range(2))
    before = packer.pack(0, first)
    for tensor in tensors.values():
        tensor.mul_(-2)
    after = packer.pack(0, second)
    signs = second.view(torch.bfloat16) == first.view(torch.bfloat16) * -2
    assert signs.all() and not np.array_equal(before.sums, after.sums)


def test_a_rank_that_brings_nothing_to_a_bucket_adds_nothing():
    plan = qwen_plan(Precision("bfloat16", "bfloat16"))
    idle = Packer(plan, 3, {})
    memory = torch.zeros(idle.form(0).size, dtype=torch.uint8)
    share: Share = idle.pack(0, memory)
    run, _ = idle.pack_run(0)
    assert not share.sums.any() and not share.flags.any() and not memory.any() and len(run) == 0
