"""A plan dealt out over ranks and engines: every byte goes once, and no rank sends more than it must."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimx.errors import SlimxError
from slimx.extras.direct.dealing import BYTES, deal, only, share, spread_of
from slimx.extras.direct.wire import move_bytes, quantized_moves, wire_bytes
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.extras.planner.memory.publication import direct_memory
from slimx.layout.maps import Rect
from slimx.layout.number_formats import Precision
from slimx.layout.parts import Part
from slimx.reshard.plan.copy_plan import Plan, compile_plan
from tests.unit.reshard.packer_stand import pack_all
from tests.unit.reshard.plan_oracle import carry_out

BF16 = Precision("bfloat16", "bfloat16")
HUGE = 2**40


@dataclass(frozen=True)
class Layouts:
    """Matrices that trainers hold in bands of rows, each band on some ranks, and engine ranks in bands or whole."""

    ranks: int
    engine: int
    engines: int
    tensors: tuple[tuple[int, int, tuple[tuple[int, ...], ...], bool], ...]
    """Rows of a band, columns, ranks of each band, and whether each engine rank takes all of it."""
    bucket_bytes: int = HUGE

    def plan(self) -> Plan:
        source, target = [], []
        for number, (high, cols, bands, whole) in enumerate(self.tensors):
            name, rows = f"t{number}", high * len(bands)
            for band, holders in enumerate(bands):
                rect = Rect(0, band * high, 0, high, cols, 0, 0)
                source.append(Part(f"{name}.{band}", (high, cols), holders, (name,), (rect,)))
            local = rows if whole else rows // self.engine
            for rank in range(1 if whole else self.engine):
                ranks = tuple(range(self.engine)) if whole else (rank,)
                target.append(Part(name, (local, cols), ranks, (name,), (Rect(0, rank * local, 0, local, cols, 0, 0),)))
        return compile_plan(source, target, precision=BF16, bucket_bytes=self.bucket_bytes, ranks=self.engine)

    def trainers(self) -> list[dict[str, torch.Tensor]]:
        """Returns the tensors that each trainer rank holds: all elements differ, none is 0."""
        weights: list[dict[str, torch.Tensor]] = [{} for _ in range(self.ranks)]
        for number, matrix in enumerate(self.numbers()):
            high, _, bands, _ = self.tensors[number]
            for band, ranks in enumerate(bands):
                for rank in ranks:
                    weights[rank][f"t{number}.{band}"] = matrix[band * high : (band + 1) * high]
        return weights

    def numbers(self) -> list[torch.Tensor]:
        out, first = [], 1
        for high, cols, bands, _ in self.tensors:
            count = high * len(bands) * cols
            out.append(torch.arange(first, first + count).view(-1, cols))
            first += count
        return out

    def expected(self) -> list[dict[str, torch.Tensor]]:
        """Returns the tensors that each rank of each engine is to hold."""
        out: list[dict[str, torch.Tensor]] = []
        for rank in range(self.engine):
            shards = {}
            for number, matrix in enumerate(self.numbers()):
                rows = len(matrix) // self.engine
                shards[f"t{number}"] = matrix if self.tensors[number][3] else matrix[rank * rows : (rank + 1) * rows]
            out.append(shards)
        return out * self.engines


@st.composite
def layouts(draw: st.DrawFn) -> Layouts:
    ranks = draw(st.integers(1, 6))
    holders = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda members: tuple(sorted(members)))
    bands = st.sampled_from([1, 2]).flatmap(lambda n: st.tuples(*[holders] * n))
    tensor = st.tuples(st.sampled_from([4, 12, 48, 96]), st.sampled_from([1, 3, 8]), bands, st.booleans())
    return Layouts(
        ranks=ranks,
        engine=draw(st.sampled_from([1, 2, 4])),
        engines=draw(st.integers(1, 3)),
        tensors=tuple(draw(st.lists(tensor, min_size=1, max_size=5))),
        bucket_bytes=draw(st.sampled_from([1, 500, HUGE])),
    )


def least_busiest(plan: Plan, ranks: int, engines: int) -> float:
    """Returns the bytes of the busiest rank of the best division: the maximum over sets of ranks of the bytes that only
    the set holds, divided by its size (Hall's condition)."""
    amounts = np.bincount(plan.holders.of, weights=move_bytes(plan), minlength=len(plan.holders.groups)) * engines
    sets = [set(chosen) for size in range(1, ranks + 1) for chosen in combinations(range(ranks), size)]
    return max(
        sum(amount for amount, group in zip(amounts, plan.holders.groups, strict=True) if chosen.issuperset(group))
        / len(chosen)
        for chosen in sets
    )


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_byte_arrives_once_and_the_busiest_link_carries_the_minimum(case: Layouts):
    plan = case.plan()
    dealt = deal(plan, engines=case.engines, grain=1)
    assert dealt.targets == case.engine * case.engines and dealt.count == plan.count

    found = carry_out(dealt, case.trainers())
    for tensors, expected in zip(found, case.expected(), strict=True):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)

    wire = wire_bytes(dealt)
    received, sent = wire.received(dealt.targets), wire.sent(case.ranks)
    assert received.tolist() == wire_bytes(plan).received(plan.targets).tolist() * case.engines
    assert sent.sum() == received.sum()
    best = least_busiest(plan, case.ranks, case.engines)
    # What cannot be divided: a row for each cut of each line.
    lines = len({(int(m["bucket"]), int(g)) for m, g in zip(plan.moved, plan.holders.of, strict=True)})
    row = max(cols for _, cols, _, _ in case.tensors) * 2
    assert sent.max() <= 1.05 * best + 2 * row * lines

    again = deal(case.plan(), engines=case.engines, grain=1)
    assert again.to_bytes() == dealt.to_bytes()


def test_engines_that_are_copies_take_from_different_ranks():
    """Four engines, four ranks that hold all: no rank sends more than one engine's bytes, and no move is divided."""
    case = Layouts(4, 1, 4, ((64, 8, ((0, 1, 2, 3),), True),) * 8)
    dealt = deal(case.plan(), engines=4)
    wire = wire_bytes(dealt)
    assert len({*wire.sent(4).tolist()}) == len({*wire.received(4).tolist()}) == 1
    assert len(dealt.moved) == 4 * 8
    senders = [set(dealt.moved["source"][dealt.moved["target"] == engine].tolist()) for engine in range(4)]
    assert sorted(map(tuple, senders)) == [(0,), (1,), (2,), (3,)]


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_staggered_engines_get_the_same_bytes_in_other_buckets(case: Layouts):
    plan = case.plan()
    spread = spread_of(plan, [1] * case.engines, staggered=True)
    dealt = spread.deal(plan)
    for tensors, expected in zip(carry_out(dealt, case.trainers()), case.expected(), strict=True):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert wire_bytes(dealt).sent(case.ranks).sum() == wire_bytes(plan).sent(case.ranks).sum() * case.engines
    for engine, turn in enumerate(spread.turns):
        for rank in range(plan.targets):
            target = dealt.buckets[engine * plan.targets + rank]
            assert [*target[plan.count - turn :], *target[: plan.count - turn]] == plan.buckets[rank]


def test_staggered_engines_are_served_by_all_stages_at_a_time():
    """Four stages with four layers each, one bucket per layer: without turns, a quarter of the ranks sends each."""
    case = Layouts(4, 1, 4, tuple((64, 8, ((layer // 4,),), True) for layer in range(16)), bucket_bytes=1)
    plan = case.plan()

    def busiest(staggered: bool) -> int:
        dealt = spread_of(plan, [1] * 4, staggered=staggered).deal(plan)
        return direct_memory(dealt, ranks=4, edges=range(5)).ring

    assert plan.count == 16 and busiest(False) == 4 * busiest(True)


def test_receivers_of_one_engine_have_the_same_turn():
    case = Layouts(2, 1, 1, ((4, 1, ((0,),), True),) * 6, bucket_bytes=1)
    assert spread_of(case.plan(), [2, 1], staggered=True) == ([0, 0, 3], [0, 1, 2, 3])
    assert spread_of(case.plan(), [2, 1]).turns == [0, 0, 0]


def test_small_tensors_are_sent_by_the_ranks_in_turn():
    """A vector in each of many buckets, too small to be divided."""
    case = Layouts(4, 1, 1, ((64, 1, ((0, 1, 2, 3),), True),) * 64, bucket_bytes=1)
    dealt = deal(case.plan())
    assert dealt.count == 64 and len(dealt.moved) == 64
    sent = wire_bytes(dealt).sent(4)
    assert sent.max() <= 1.1 * sent.mean()


def test_amounts_are_poured_on_top_of_what_only_some_can_send():
    """Rank 0 alone holds 60; 40 that both hold go to rank 1 until it has as much."""
    parts = share(np.array([60.0, 100.0]), [(0,), (0, 1)])
    assert parts[0].tolist() == [1.0]
    assert parts[1].tolist() == pytest.approx([0.2, 0.8])


def test_quantized_moves_are_cut_between_blocks_to_the_same_bytes():
    """Four ranks that hold the same matrices: the buckets are those of the plan as it was compiled."""
    shapes = {"a": (1024, 256), "b": (384, 128)}
    parts = [
        Part(name, shape, (0, 1, 2, 3), (name,), (Rect(0, 0, 0, *shape, 0, 0),), quantized=True)
        for name, shape in shapes.items()
    ]
    plan = compile_plan(
        parts,
        [part._replace(ranks=(0,)) for part in parts],
        precision=Precision("bfloat16", "bfloat16", quantization("ieee")),
        bucket_bytes=HUGE,
    )
    dealt = deal(plan, engines=2, grain=1)
    assert quantized_moves(dealt).all()
    assert not (dealt.moved["row"] % 128).any() and not (dealt.moved["rows"] % 128).any()
    assert wire_bytes(dealt).sent(4).min() > 0

    draw = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=draw).to(torch.bfloat16) for name, shape in shapes.items()}
    ((expected, before),) = pack_all(plan, [weights] * 4)
    ((found, after),) = pack_all(dealt, [weights] * 4)
    assert torch.equal(after, torch.cat([before, before]))
    assert [t.checksum for t in found.tensors] == [t.checksum for t in expected.tensors] * 2


def test_one_target_of_a_distributed_plan_is_a_plan():
    case = Layouts(2, 2, 2, ((96, 8, ((0, 1),), False), (12, 3, ((0,), (1,)), True)))
    dealt = deal(case.plan(), engines=2, grain=1)
    for target, expected in enumerate(case.expected()):
        (found,) = carry_out(Plan.from_bytes(only(dealt, target).to_bytes()), case.trainers())
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_dealing_takes_the_memory_that_is_reckoned_with():
    plan, engines = Layouts(2, 1, 1, ((4, 1, ((0, 1),), True),)).plan(), 40_000
    tracemalloc.start()
    try:
        deal(plan, engines=engines)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.7 * BYTES < peak / engines / len(plan.moved) <= BYTES


def test_engines_that_exceed_memory_are_refused_before_allocation():
    case = Layouts(2, 1, 1, ((4, 1, ((0, 1),), True),))
    with pytest.raises(SlimxError) as error:
        deal(case.plan(), engines=2**40)
    assert (error.value.code, error.value.about) == ("dealing.memory", "rollout.engines.count")


def test_a_plan_that_does_not_know_its_holders_is_refused():
    case = Layouts(2, 1, 1, ((4, 1, ((0, 1),), True),))
    with pytest.raises(SlimxError) as error:
        deal(Plan.from_bytes(case.plan().to_bytes()))
    assert error.value.code == "dealing.holders"
