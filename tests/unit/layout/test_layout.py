"""Ranks stand where megatron-core puts them, and parts that lose or repeat a checkpoint element are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slimx.config.sections.trainer import Trainer
from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import Part, check_coverage
from slimx.layout.ranks import Coordinates, EngineSizes, Sizes, coordinates, sizes_of
from slimx.layout.table import Row, Table
from tests.refusals import numbers, refused
from tests.unit.layout.layout_stand import LAYOUTS, MODELS, name_of

QWEN = MODELS["qwen"].table


@pytest.mark.parametrize("sizes", LAYOUTS, ids=name_of)
def test_coordinates_are_those_of_megatrons_parallel_state(sizes: Sizes):
    """Megatron's own initialization, called as `slimx.trainer.parallel` calls it, on torch's fake process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that megatron-core would use on CUDA
        from megatron.core import parallel_state

    for rank in range(sizes.world):
        dist.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(
                sizes.tensor,
                sizes.pipeline,
                context_parallel_size=sizes.context,
                expert_model_parallel_size=sizes.expert,
                expert_tensor_parallel_size=sizes.expert_tensor,
                create_gloo_process_groups=False,  # the fake backend has none
            )
            assert coordinates(rank, sizes) == Coordinates(
                tensor=parallel_state.get_tensor_model_parallel_rank(),
                data=parallel_state.get_data_parallel_rank(),
                pipeline=parallel_state.get_pipeline_model_parallel_rank(),
                expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
                expert=parallel_state.get_expert_model_parallel_rank(),
                expert_data=parallel_state.get_expert_data_parallel_rank(),
                context=parallel_state.get_context_parallel_rank(),
            ), f"rank {rank}"
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def test_sizes_follow_the_configuration_with_megatrons_default():
    config = Trainer(world_size=16, tensor=2, pipeline=2, expert=2)
    assert sizes_of(config) == Sizes(tensor=2, pipeline=2, data=4, expert=2, expert_tensor=2)
    assert sizes_of(Trainer(world_size=4, tensor=2, expert=4, expert_tensor=1)) == Sizes(
        tensor=2, data=2, expert=4, expert_tensor=1
    )


def test_engine_sizes_that_do_not_divide_are_refused():
    sizes = EngineSizes(tensor=8, expert=4, pipeline=2, attention_data=2)
    assert (sizes.world, sizes.attention_tensor, sizes.expert_tensor) == (16, 4, 2)
    with refused("engines.divides", about="expert"):
        EngineSizes(tensor=8, expert=3)
    with refused("engines.divides", about="dp_attention"):
        EngineSizes(tensor=8, attention_data=16)


# Refusals -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unproven(Table):
    """A table whose rows are taken as they are."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class Wrong:
    """A map that returns the given rectangles for every request."""

    rects: tuple[Rect, ...]

    def local(self, shapes, axis, rank, size):
        return shapes[0], list(self.rects)


def with_output(rects: tuple[Rect, ...]) -> Table:
    """Returns the model with another map of its output layer, lm_head.weight of 140 x 12."""
    rows = tuple(replace(row, map=Wrong(rects)) if row.name == "output_layer.weight" else row for row in QWEN.rows)
    return Unproven(rows, layers=QWEN.layers, experts=QWEN.experts)


@contextmanager
def uncovered(code: str, *place: int) -> Iterator[None]:
    """Asserts a refusal of lm_head.weight; `place`: row and column, or the shape that is too small."""
    with refused(code, about="weight table: lm_head.weight") as caught:
        yield
    assert numbers(caught.value) == list(place)


def check(table: Table, sizes: Sizes = Sizes()) -> None:  # noqa: B008  (frozen)
    check_coverage(table.checkpoint_shapes(), MegatronLayout(table, sizes).parts())


def test_a_tensor_that_two_rows_claim_is_refused_by_name():
    norm = "model.layers.{layer}.input_layernorm.weight"
    table = replace(QWEN, rows=(*QWEN.rows, Row("decoder.layers.{layer}.copy.weight", ((norm, (12,)),))))
    with refused("table.two_rows", about="model.layers.0.input_layernorm.weight"):
        table.checkpoint_shapes()


@pytest.mark.parametrize(
    "aliases",
    [{"lm_head.weight": "model.norm.weight"}, {"other.weight": "nothing.weight"}],
    ids=["taken", "of nothing"],
)
def test_an_alias_must_repeat_a_tensor_and_be_none_itself(aliases: dict[str, str]):
    ((name, original),) = aliases.items()
    with refused("table.alias", about=name):
        replace(QWEN, aliases=aliases).checkpoint_shapes()


def test_a_row_that_no_stage_holds_is_refused_by_name():
    parts = [part for part in MegatronLayout(QWEN, Sizes(pipeline=2)).parts() if min(part.ranks) > 0]
    with refused("table.coverage", about="weight table: model.embed_tokens.weight"):
        check_coverage(QWEN.checkpoint_shapes(), parts)


def test_a_split_tensor_that_two_ranks_hold_whole_is_refused():
    with uncovered("table.overlap", 0, 0):
        check(with_output((Rect(0, 0, 0, 140, 12, 0, 0),)), Sizes(tensor=2))


def test_copies_do_not_count_and_cannot_stand_in_for_what_they_repeat():
    name, shape = "a.weight", (4, 3)
    original = Part("local", shape, (0,), (name,), (Rect(0, 0, 0, 4, 3, 0, 0),))
    copy = original._replace(ranks=(1,), copy=True)
    check_coverage({name: shape}, [original, copy])
    with refused("table.coverage", about="weight table: a.weight"):
        check_coverage({name: shape}, [copy])


# Of each case the areas add up to 140 x 12.
HIDDEN = {
    "a gap": ((Rect(0, 0, 0, 139, 12, 0, 0),), "table.coverage", 139, 0),
    "an overlap that a gap of the same size hides": (
        (Rect(0, 0, 0, 72, 12, 0, 0), Rect(0, 70, 0, 68, 12, 72, 0)),
        "table.overlap",
        70,
        0,
    ),
    # Columns 0-5 down to row 139; next to them columns 6-11 of rows 0-8 and 10-139, and row 12 of the left half again.
    "an overlap of rectangles that are not neighbours": (
        (
            Rect(0, 0, 0, 140, 6, 0, 0),
            Rect(0, 0, 6, 9, 6, 0, 0),
            Rect(0, 12, 0, 1, 6, 0, 0),
            Rect(0, 10, 6, 130, 6, 0, 0),
        ),
        "table.overlap",
        12,
        0,
    ),
    "beyond the last row": ((Rect(0, 1, 0, 140, 12, 0, 0),), "table.beyond", 140, 12),
    "beyond the last column": ((Rect(0, 0, 6, 140, 12, 0, 0),), "table.beyond", 140, 12),
}


def test_rectangles_that_meet_in_a_corner_are_each_counted():
    quarters = tuple(Rect(0, row, col, 70, 6, row, col) for row in (0, 70) for col in (0, 6))
    check(with_output(quarters))
    for missing in range(4):
        holed = quarters[:missing] + quarters[missing + 1 :]
        place = quarters[missing]
        with uncovered("table.coverage", place.row, place.col):
            check(with_output(holed))
    with uncovered("table.overlap", 70, 6):
        check(with_output((*quarters, quarters[3])))


@pytest.mark.parametrize("case", HIDDEN)
def test_rectangles_that_do_not_cover_a_tensor_once_are_refused(case: str):
    rects, code, *place = HIDDEN[case]
    with uncovered(code, *place):
        check(with_output(rects))


def test_a_part_of_a_tensor_that_no_table_has_is_refused_by_name():
    part = Part("local", (4, 3), (0,), ("unknown.weight",), (Rect(0, 0, 0, 4, 3, 0, 0),))
    with refused("table.unknown_tensor", about="unknown.weight"):
        check_coverage({}, [part])
