"""A plan's moves, carried out naively, make every target tensor from the trainers' tensors, each element once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from slimx.errors import SlimxError
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Copy, IndexMap, Rect, RotateHalf
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import ITEMSIZE, Precision
from slimx.layout.parts import Part
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Row, Table, checkpoint_parts
from slimx.reshard.plan import copy_plan
from slimx.reshard.plan.copy_plan import ALIGNMENT, Plan, compile_plan
from tests.refusals import numbers
from tests.unit.layout.engine_stand import SERVED, engine_rank, engine_sizes
from tests.unit.layout.layout_stand import (
    LAYOUTS,
    MODELS,
    Tensors,
    assert_same,
    bytes_read,
    checkpoint,
    split_of,
    trainer_shards,
)
from tests.unit.reshard.plan_oracle import carry_out

BF16 = Precision("bfloat16", "bfloat16")
HUGE = 2**40


def cases() -> list[tuple[Sizes, str, EngineSizes | None, int]]:
    """Draws pairs of a source and a target; every source layout occurs, and every target kind with each model."""
    draw = random.Random(3)
    out: list[tuple[Sizes, str, EngineSizes | None, int]] = []
    for served in SERVED.values():
        for engine in (None, *draw.sample(engine_sizes(served), 6)):
            out.append((LAYOUTS[len(out) % len(LAYOUTS)], served.name, engine, draw.choice([1, 3000, HUGE])))
    return out


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_plan_fills_every_target_tensor_from_the_trainers(case):
    sizes, served, engine, bucket_bytes = case
    model = SERVED[served].model
    whole = checkpoint(model)
    source = MegatronLayout(model.table, replace(sizes, split=split_of(model, sizes))).parts()
    if engine is None:
        target, ranks = checkpoint_parts(model.table), 1
        expected = [whole]
    else:
        target, ranks = EngineLayout(SERVED[served].table, engine).parts(), engine.world
        expected = [engine_rank(SERVED[served], whole, engine, rank) for rank in range(ranks)]
    plan = compile_plan(source, target, precision=BF16, bucket_bytes=bucket_bytes, ranks=ranks)
    assert plan.targets == ranks
    for rank, found in enumerate(carry_out(plan, trainer_shards(model, sizes))):
        assert_same(found, expected[rank], f"target {rank}")
    assert_buckets(plan, bucket_bytes)
    sizes_sent = [
        (4 if name.endswith("correction_bias") else 2) * int((t != 0).sum()) for e in expected for name, t in e.items()
    ]
    assert int(bytes_read(plan).sum()) == sum(sizes_sent), "what is sent is what is filled"


def assert_buckets(plan: Plan, bucket_bytes: int) -> None:
    """Asserts that tensors are aligned, one after another, within the requested size unless one alone is larger."""
    for buckets in plan.buckets:
        assert len(buckets) == plan.count
        for k, bucket in enumerate(buckets):
            end = 0
            for t in bucket.tensors:
                assert t.offset == -(-end // ALIGNMENT) * ALIGNMENT
                assert t.nbytes == int(np.prod(t.shape)) * ITEMSIZE[t.dtype]
                end = t.offset + t.nbytes
            assert bucket.size == end
            values = [t for t in bucket.tensors if t.scale_of < 0]
            assert end <= bucket_bytes or len(values) == 1
            if bucket.tensors and k and len(values):
                before = -(-buckets[k - 1].size // ALIGNMENT) * ALIGNMENT
                need = bucket.tensors[1].offset + bucket.tensors[1].nbytes if has_scales(bucket) else values[0].nbytes
                assert before + need > bucket_bytes, "a bucket ends only where the next tensor does not fit"
    order = plan.moved[["bucket", "source", "target", "tensor"]]
    assert order.tolist() == sorted(order.tolist())
    for (bucket, source), count in Counter((b, s) for b, s, _, _ in order.tolist()).items():
        assert len(plan.moves_of(source, bucket)) == count


def has_scales(bucket: Any) -> bool:
    return len(bucket.tensors) > 1 and bucket.tensors[1].scale_of == 0


# Layouts that no family has: reordered tensors as source and target ---------------------------------------------------

MAPS: list[IndexMap] = [Copy(), RotateHalf(6, 4, 1), RotateHalf(6, 6), RotateHalf(12, 8, 2)]
WEIGHT = (("a.weight", (24, 8)),)
VALUES = torch.arange(1, 193).view(24, 8)


def parts_of(map: IndexMap, axis: int | None, size: int, sources: Any = WEIGHT, experts: int = 0) -> list[Part]:
    """Returns the parts of one row split over `size` ranks."""
    row = Row("local{expert}" if experts else "local", sources, map, axis)
    table = Table((row,), layers=1, experts=experts)
    return list(MegatronLayout(table, Sizes(tensor=size, expert_tensor=size)).parts())


def by_hand(parts: Iterable[Part], whole: Tensors, ranks: int) -> list[Tensors]:
    """Returns the tensors of each rank, copied element by element."""
    out: list[Tensors] = [{} for _ in range(ranks)]
    for part in parts:
        local = torch.zeros(part.shape, dtype=torch.int64)
        for r in part.rects:
            source = whole[part.sources[r.source]].reshape(-1, whole[part.sources[r.source]].shape[-1])
            for i in range(r.rows):
                for j in range(r.cols):
                    local[r.local_row + i, r.local_col + j] = source[r.row + i * r.step, r.col + j]
        for rank in part.ranks:
            out[rank][part.name] = local
    return out


@pytest.mark.parametrize("target", MAPS, ids=str)
@pytest.mark.parametrize("source", MAPS, ids=str)
def test_rotary_orders_meet_in_both_directions(source: IndexMap, target: IndexMap):
    whole = {"a.weight": VALUES}
    for here, there in ((1, 2), (2, 1), (2, 2)):
        source_parts, target_parts = parts_of(source, 0, here), parts_of(target, 0, there)
        plan = compile_plan(source_parts, target_parts, precision=BF16, bucket_bytes=HUGE, ranks=there)
        for found, expected in zip(
            carry_out(plan, by_hand(source_parts, whole, here)), by_hand(target_parts, whole, there), strict=True
        ):
            assert_same(found, expected, f"{here} to {there} ranks")


# Whose bytes are sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "deepseek-mtp"])
@pytest.mark.parametrize(
    "sizes", [Sizes(data=8), Sizes(data=4, tensor=2), Sizes(data=8, expert=2), Sizes(context=2, data=4)], ids=str
)
def test_replicas_share_the_sending(name: str, sizes: Sizes):
    """Every tensor here has at least two holders, so that no rank need send much more than the others."""
    model = MODELS[name]
    plan = compile_plan(
        MegatronLayout(model.table, sizes).parts(), checkpoint_parts(model.table), precision=BF16, bucket_bytes=HUGE
    )
    sent = bytes_read(plan).sum(axis=1)
    assert len(sent) == sizes.world and sent.max() <= 1.5 * sent.mean()


def test_the_rank_with_the_original_sends_and_copies_are_not_sent():
    model, sizes = MODELS["deepseek-mtp"], Sizes(pipeline=2)
    parts = list(MegatronLayout(model.table, sizes).parts())
    plan = compile_plan(parts, checkpoint_parts(model.table), precision=BF16, bucket_bytes=HUGE)
    (copy,) = [part for part in parts if part.copy]
    number = next(k for k, p in enumerate(plan.parameters) if p.name == copy.name)
    assert set(plan.moved[plan.moved["parameter"] == number]["source"].tolist()) == {0} and copy.ranks == (1,)
    assert plan.launches == 1 and len(plan.moves_of(5, 0)) == len(plan.moves_of(0, 5)) == 0


def test_a_prediction_layer_is_left_out_if_only_a_draft_loads_it():
    table = MODELS["deepseek-mtp"].table
    with_mtp, without = ({part.name for part in checkpoint_parts(table, mtp=mtp)} for mtp in (True, False))
    assert with_mtp == set(table.checkpoint_shapes())
    assert with_mtp - without == {name for name in table.checkpoint_shapes() if name.startswith("model.layers.4.")}


def test_tensors_have_the_engines_dtype_unless_their_row_fixes_one():
    table = MODELS["deepseek"].table
    for trainer, engine in (("float32", "bfloat16"), ("bfloat16", "float32")):
        parts = MegatronLayout(table, Sizes()).parts()
        precision = Precision(trainer, engine)
        plan = compile_plan(parts, checkpoint_parts(table), precision=precision, bucket_bytes=HUGE)
        for t in plan.buckets[0][0].tensors:
            assert t.dtype == ("float32" if t.name.endswith("e_score_correction_bias") else engine)
        for p in plan.parameters:
            assert p.dtype == ("float32" if p.name.endswith("expert_bias") else trainer)


# Errors ---------------------------------------------------------------------------------------------------------------


def whole_part(name: str, rows: int, cols: int, **changes: Any) -> Part:
    return Part(name, (rows, cols), (0,), (name,), (Rect(0, 0, 0, rows, cols, 0, 0),))._replace(**changes)


def refusal(source: list[Part], target: list[Part], **how: Any) -> SlimxError:
    with pytest.raises(SlimxError) as caught:
        compile_plan(source, target, **{"precision": BF16, "bucket_bytes": HUGE} | how)
    return caught.value


def test_a_tensor_that_the_source_lacks_is_refused_by_name():
    error = refusal([whole_part("a", 8, 6)], [whole_part("a", 8, 6), whole_part("b", 8, 6)])
    assert (error.code, error.about) == ("plan.unheld", "b")


def test_more_moves_than_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(copy_plan, "MOVES", 2)
    parts = [whole_part(name, 8, 6) for name in "abc"]
    assert len(compile_plan(parts, parts[:2], precision=BF16, bucket_bytes=HUGE).moved) == 2
    error = refusal(parts, parts)
    assert (error.code, error.about) == ("plan.moves", "c")


@pytest.mark.parametrize(
    ("rects", "code", "row", "column"),
    [
        ([Rect(0, 0, 0, 7, 6, 0, 0)], "table.coverage", 7, 0),
        ([Rect(0, 0, 0, 8, 5, 0, 0)], "table.coverage", 0, 5),
        ([Rect(0, 0, 0, 5, 6, 0, 0), Rect(0, 4, 0, 4, 6, 5, 0)], "table.overlap", 4, 0),
        ([Rect(0, 0, 0, 4, 6, 0, 0, step=2)], "table.coverage", 1, 0),
        ([Rect(0, 0, 0, 4, 6, 0, 0, step=2), Rect(0, 0, 0, 8, 6, 4, 0)], "table.overlap", 0, 0),
    ],
    ids=str,
)
def test_a_source_with_missing_or_repeated_elements_is_refused(rects, code, row, column):
    rows = max(r.local_row + r.rows for r in rects)
    source = whole_part("a", 8, 6)._replace(shape=(rows, 6), rects=tuple(rects))
    error = refusal([source], [whole_part("a", 8, 6)])
    assert error.code == code and "a" in error.about.split()
    assert numbers(error) == [0, 0, row, column], "where the part begins, and where it lacks an element or has it twice"


def test_only_the_gap_that_a_target_asks_for_counts():
    """The trainer's rows 0 to 5 suffice for a target of rows 2 to 5, and do not for one of rows 2 to 6."""
    source = [whole_part("a", 8, 6, shape=(6, 6), rects=(Rect(0, 0, 0, 6, 6, 0, 0),))]
    enough = whole_part("a", 8, 6, shape=(4, 6), rects=(Rect(0, 2, 0, 4, 6, 0, 0),))
    assert len(compile_plan(source, [enough], precision=BF16, bucket_bytes=HUGE).moved) == 1
    more = enough._replace(shape=(5, 6), rects=(Rect(0, 2, 0, 5, 6, 0, 0),))
    error = refusal(source, [more])
    assert (error.code, numbers(error)) == ("table.coverage", [2, 0, 4, 0])


@pytest.mark.parametrize(
    ("rects", "padded", "code", "place"),
    [
        ((Rect(0, 0, 0, 4, 6, 0, 0), Rect(0, 4, 0, 4, 6, 5, 0)), False, "table.coverage", [4, 0]),
        ((Rect(0, 0, 0, 4, 6, 0, 0), Rect(0, 4, 0, 4, 6, 3, 0)), True, "table.overlap", [3, 0]),
        ((Rect(0, 0, 0, 8, 6, 0, 0),), False, "table.coverage", [8, 0]),
        ((Rect(0, 0, 0, 8, 5, 0, 0),), False, "table.coverage", [0, 5]),
        ((Rect(0, 0, 0, 8, 6, 1, 1),), True, "table.beyond", [10, 6]),
        ((Rect(0, 0, 0, 8, 6, 4, 0),), False, "table.beyond", [10, 6]),
    ],
    ids=str,
)
def test_a_target_with_missing_or_repeated_elements_is_refused(rects, padded, code, place):
    """`place`: row and column, or the shape that is too small."""
    target = Part("b", (10, 6), (0,), ("a",), rects, padded=padded)
    error = refusal([whole_part("a", 8, 6)], [target])
    assert (error.code, error.about, numbers(error)) == (code, "b", place)


def test_padding_may_be_anywhere_in_a_target():
    rects = (Rect(0, 0, 0, 4, 5, 1, 0), Rect(0, 4, 0, 4, 5, 6, 1))
    target = Part("b", (11, 6), (0,), ("a",), rects, padded=True)
    assert len(compile_plan([whole_part("a", 8, 6)], [target], precision=BF16, bucket_bytes=HUGE).moved) == 2


def test_parameters_that_no_target_reads_are_listed():
    plan = compile_plan(
        [whole_part(name, 8, 6) for name in "abc"], [whole_part("b", 8, 6)], precision=BF16, bucket_bytes=HUGE
    )
    assert plan.unread == ("a", "c") and Plan.from_bytes(plan.to_bytes()).unread == ("a", "c")


def test_a_tensor_that_comes_twice_for_a_rank_is_refused_by_name():
    twice = [whole_part("a", 8, 6, ranks=ranks) for ranks in ((0, 1), (1,))]
    error = refusal([whole_part("a", 8, 6)], twice, ranks=2)
    assert (error.code, error.about, numbers(error)) == ("plan.twice", "a", [1])


def test_a_target_rank_beyond_the_plan_is_refused_with_the_numbers():
    error = refusal([whole_part("a", 8, 6)], [whole_part("a", 8, 6, ranks=(0, 2))], ranks=2)
    assert (error.code, error.about, numbers(error)) == ("plan.rank", "a", [2, 2])


# The same bytes -------------------------------------------------------------------------------------------------------


def test_a_plan_survives_serialization():
    served, sizes = SERVED["fused"], EngineSizes(tensor=2, expert=2)
    source = MegatronLayout(served.model.table, Sizes(tensor=2, data=2, expert=2)).parts()
    precision = Precision("float32", "bfloat16", quantization("te", (2, 2)))
    target = EngineLayout(served.table, sizes).parts()
    plan = compile_plan(source, target, precision=precision, bucket_bytes=3000, ranks=2)
    again = Plan.from_bytes(plan.to_bytes())
    assert again.to_bytes() == plan.to_bytes()
    assert (again.precision, again.parameters, again.buckets) == (plan.precision, plan.parameters, plan.buckets)
    assert np.array_equal(again.moved, plan.moved) and np.array_equal(bytes_read(again), bytes_read(plan))
    assert np.array_equal(again.moves_of(1, 3), plan.moves_of(1, 3)) and again.launches == plan.launches
    assert msgspec.to_builtins(again.precision) == msgspec.to_builtins(precision)


def test_a_plan_without_moves_has_no_launches():
    plan = compile_plan([whole_part("a", 8, 6)], [], precision=BF16, bucket_bytes=HUGE, ranks=2)
    assert plan.launches == 0 and plan.count == 1 and len(plan.moves_of(0, 0)) == 0
    assert Plan.from_bytes(plan.to_bytes()).buckets == plan.buckets
