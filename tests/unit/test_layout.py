"""Every checkpoint element has exactly one owner in every layout, and ranks stand where megatron-core puts them."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slimx.config.schema import Trainer
from slimx.errors import SlimxError
from slimx.layout.maps import Concat, Copy, InterleaveQKV, Rect
from slimx.layout.ranks import Coordinates, Sizes, coordinates, sizes_of
from slimx.layout.table import Held, Row, Table, check_coverage, matrix
from slimx.models.qwen3_moe import weight_table

# No two dimensions alike and no square matrix, so that a transposed or exchanged one cannot pass.
HF = {
    "hidden_size": 12,
    "head_dim": 6,
    "vocab_size": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 2,
}
TABLE = weight_table(HF)
GRID = [
    Sizes(tensor=tensor, pipeline=pipeline, data=data, expert=expert, expert_tensor=expert_tensor)
    for tensor, pipeline, data, expert, expert_tensor in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2, 4), (1, 2))
    if tensor * data % (expert * expert_tensor) == 0
]
Tensors = dict[str, torch.Tensor]


def name_of(sizes: Sizes) -> str:
    return f"TP{sizes.tensor}PP{sizes.pipeline}DP{sizes.data}EP{sizes.expert}ETP{sizes.expert_tensor}"


def places_of(sizes: Sizes) -> list[Coordinates]:
    return [coordinates(rank, sizes) for rank in range(sizes.world)]


def checkpoint() -> Tensors:
    """A Hugging Face checkpoint in which no two elements have the same value."""
    out, start = {}, 1
    for name, shape in TABLE.checkpoint().items():
        count = matrix(shape)[0] * matrix(shape)[1]
        out[name] = torch.arange(start, start + count).view(shape)
        start += count
    return out


def part(tensor: torch.Tensor, row: int, col: int, rect: Rect) -> torch.Tensor:
    return tensor.view(matrix(tensor.shape))[row : row + rect.rows, col : col + rect.cols]


def scatter(whole: Tensors, held: Held) -> torch.Tensor:
    """One rank's local tensor; an element that no rectangle fills stays 0."""
    local = torch.zeros(held.shape, dtype=torch.int64)
    for rect in held.rects:
        source = whole[held.sources[rect.source][0]]
        part(local, rect.local_row, rect.local_col, rect).copy_(part(source, rect.row, rect.col, rect))
    return local


def gather(locals_of_owners: list[tuple[Held, torch.Tensor]]) -> Tensors:
    out = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in TABLE.checkpoint().items()}
    for held, local in locals_of_owners:
        for rect in held.rects:
            target = part(out[held.sources[rect.source][0]], rect.row, rect.col, rect)
            target.copy_(part(local, rect.local_row, rect.local_col, rect))
    return out


def locals_of(rank: int, sizes: Sizes, whole: Tensors) -> Tensors:
    """Local name -> local tensor of one rank."""
    return {held.name: scatter(whole, held) for held in TABLE.held_by(coordinates(rank, sizes), sizes)}


@pytest.mark.parametrize("sizes", GRID, ids=name_of)
def test_a_checkpoint_comes_back_bit_for_bit_from_the_owners_of_any_layout(sizes):
    whole = checkpoint()
    check_coverage(TABLE, sizes, places_of(sizes))
    owned = []
    for place in places_of(sizes):
        for held in TABLE.held_by(place, sizes):
            local = scatter(whole, held)
            assert (local > 0).all(), f"{held.name} of {place} has elements that no rectangle fills"
            if held.owner:
                owned.append((held, local))
    assert sum(local.numel() for _, local in owned) == sum(tensor.numel() for tensor in whole.values())
    back = gather(owned)
    assert back.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("sizes", GRID, ids=name_of)
def test_ranks_that_differ_in_data_only_hold_the_same_bytes_and_one_of_them_owns_each(sizes):
    whole = checkpoint()
    seen: dict[tuple, tuple[torch.Tensor, int]] = {}
    for place in places_of(sizes):
        for held in TABLE.held_by(place, sizes):
            expert = ".experts." in held.name
            where = (place.expert_tensor, place.expert) if expert else (place.tensor,)
            key = (held.name, place.pipeline, *where)
            local, owners = seen.get(key, (scatter(whole, held), 0))
            assert torch.equal(local, scatter(whole, held)), key
            seen[key] = (local, owners + held.owner)
    split = {key: owners for key, (_, owners) in seen.items() if "norm" not in key[0] and "router" not in key[0]}
    assert set(split.values()) == {1}
    # What every tensor-parallel rank holds whole is owned by the first of them only.
    copied = {key: owners for key, (_, owners) in seen.items() if key not in split}
    assert all(owners == (key[2] == 0) for key, owners in copied.items())


def test_tensor_parallel_slices_are_those_of_megatron():
    """Against explicit slices of TP1 of 2, PP1 of 2, EP1 of 2 with ETP1 of 2: rank 15 of 16 stands last everywhere."""
    sizes = Sizes(tensor=2, pipeline=2, data=4, expert=2, expert_tensor=2)
    place = coordinates(15, sizes)
    assert (place.tensor, place.pipeline, place.expert, place.expert_tensor) == (1, 1, 1, 1)
    hf, local = checkpoint(), locals_of(15, sizes, checkpoint())
    layer, mlp = "model.layers.1.", "model.layers.1.mlp."
    here, moe = "decoder.layers.0.", "decoder.layers.0.mlp."
    heads = hf[layer + "self_attn.q_proj.weight"].view(8, 6, 12)
    keys, values = (hf[layer + f"self_attn.{kind}_proj.weight"].view(4, 6, 12) for kind in "kv")
    # 4 query groups of 2 heads; the second tensor-parallel rank has groups 2 and 3.
    groups = [torch.cat([heads[2 * g], heads[2 * g + 1], keys[g], values[g]]) for g in (2, 3)]
    assert torch.equal(local[here + "self_attention.linear_qkv.weight"], torch.cat(groups))
    assert torch.equal(
        local[here + "self_attention.linear_proj.weight"], hf[layer + "self_attn.o_proj.weight"][:, 24:48]
    )
    for index, expert in enumerate((2, 3)):
        gate, up, down = (hf[mlp + f"experts.{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        fc1 = torch.cat([gate[5:10], up[5:10]])
        assert torch.equal(local[moe + f"experts.linear_fc1.weight{index}"], fc1)
        assert torch.equal(local[moe + f"experts.linear_fc2.weight{index}"], down[:, 5:10])
    assert torch.equal(local[moe + "router.weight"], hf[mlp + "gate.weight"])
    assert torch.equal(local[here + "pre_mlp_layernorm.weight"][:, 0], hf[layer + "post_attention_layernorm.weight"])
    for kind in "qk":
        norm = local[here + f"self_attention.{kind}_layernorm.weight"]
        assert torch.equal(norm[:, 0], hf[layer + f"self_attn.{kind}_norm.weight"])
    norm = local[here + "self_attention.linear_qkv.layer_norm_weight"]
    assert torch.equal(norm[:, 0], hf[layer + "input_layernorm.weight"])
    assert torch.equal(local["output_layer.weight"], hf["lm_head.weight"][10:])
    assert torch.equal(local["decoder.final_layernorm.weight"][:, 0], hf["model.norm.weight"])
    assert "embedding.word_embeddings.weight" not in local
    first = locals_of(1, sizes, hf)
    assert torch.equal(first["embedding.word_embeddings.weight"], hf["model.embed_tokens.weight"][10:])
    assert "output_layer.weight" not in first and "decoder.final_layernorm.weight" not in first


@pytest.mark.parametrize("rank", [0, 1])
def test_query_key_and_value_are_interleaved_by_group(rank):
    """4 heads in 2 groups of head dimension 3: rows q0 q1 k0 v0 | q2 q3 k1 v1; each of 2 ranks has one group."""
    query, key, value = (torch.arange(n * 5).view(n, 5) + 100 * i for i, n in enumerate((12, 6, 6)))
    shape, rects = InterleaveQKV(heads=4, groups=2, head_dim=3).local([(12, 5), (6, 5), (6, 5)], 0, rank, 2)
    local = torch.full(shape, -1)
    for rect in rects:
        source = (query, key, value)[rect.source]
        part(local, rect.local_row, rect.local_col, rect).copy_(part(source, rect.row, rect.col, rect))
    q, kv = slice(6 * rank, 6 * rank + 6), slice(3 * rank, 3 * rank + 3)
    assert torch.equal(local, torch.cat([query[q], key[kv], value[kv]]))


def test_a_map_without_an_axis_gives_every_rank_the_whole():
    for rank in range(2):
        assert Copy().local([(4, 6)], None, rank, 2) == ((4, 6), [Rect(0, 0, 0, 4, 6, 0, 0)])
        shape, rects = Concat().local([(4, 6), (2, 6)], None, rank, 2)
        assert (shape, rects) == ((6, 6), [Rect(0, 0, 0, 4, 6, 0, 0), Rect(1, 0, 0, 2, 6, 4, 0)])
        shape, rects = InterleaveQKV(2, 1, 3).local([(6, 5), (3, 5), (3, 5)], None, rank, 2)
        assert shape == (12, 5) and [rect.source for rect in rects] == [0, 1, 2]


@pytest.mark.parametrize("sizes", [s for s in GRID if s.world > 1], ids=name_of)
def test_coordinates_are_those_of_megatrons_parallel_state(sizes):
    """Megatron's own initialisation, called as `slimx.trainer.parallel` calls it, on torch's fake process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that megatron-core would use on CUDA
        from megatron.core import parallel_state

    for rank in range(sizes.world):
        dist.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(
                sizes.tensor,
                sizes.pipeline,
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
            ), f"rank {rank}"
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def test_sizes_follow_the_configuration_with_megatrons_default_of_expert_tensor():
    config = Trainer(world_size=16, tensor=2, pipeline=2, expert=2)
    assert sizes_of(config) == Sizes(tensor=2, pipeline=2, data=4, expert=2, expert_tensor=2)
    assert sizes_of(Trainer(world_size=4, tensor=2, expert=4, expert_tensor=1)) == Sizes(
        tensor=2, data=2, expert=4, expert_tensor=1
    )


# Refusals -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A map that returns the given rectangles, whoever asks."""

    rects: tuple[Rect, ...]

    def local(self, shapes, axis, rank, size):
        return shapes[0], list(self.rects)


def with_row(megatron: str, **changes: object) -> Table:
    """The table with one row changed."""
    rows = [replace(row, **changes) if row.megatron == megatron else row for row in TABLE.rows]
    assert rows != list(TABLE.rows)
    return replace(TABLE, rows=tuple(rows))


def refusal(table: Table, sizes: Sizes = Sizes()) -> str:  # noqa: B008 (frozen)
    with pytest.raises(SlimxError) as caught:
        check_coverage(table, sizes, places_of(sizes))
    return str(caught.value)


def test_a_tensor_that_two_rows_claim_is_refused_by_name():
    norm = "model.layers.{layer}.input_layernorm.weight"
    table = replace(TABLE, rows=(*TABLE.rows, Row("decoder.layers.{layer}.copy.weight", ((norm, (12,)),))))
    assert "model.layers.0.input_layernorm.weight belongs to two rows" in refusal(table)


def test_a_gap_is_refused_by_name_and_place():
    table = with_row("output_layer.weight", map=Wrong((Rect(0, 0, 0, 19, 12, 0, 0),)))
    assert "lm_head.weight is not covered at row" in refusal(table)


def test_a_row_that_no_stage_holds_is_refused_by_name():
    table, sizes = TABLE, Sizes(pipeline=2)
    with pytest.raises(SlimxError, match=r"model\.embed_tokens\.weight is not covered at row 0, column 0"):
        check_coverage(table, sizes, [place for place in places_of(sizes) if place.pipeline])


def test_a_part_that_two_ranks_own_is_refused_by_name():
    """A row that every rank holds whole is owned once; were it declared split, both would bring all of it."""
    whole = Wrong((Rect(0, 0, 0, 20, 12, 0, 0),))
    assert "lm_head.weight is covered twice at row 0, column 0" in refusal(
        with_row("output_layer.weight", map=whole), Sizes(tensor=2)
    )


def test_an_overlap_that_a_gap_of_the_same_size_hides_is_refused_by_name():
    rects = (Rect(0, 0, 0, 12, 12, 0, 0), Rect(0, 10, 0, 8, 12, 12, 0))
    message = refusal(with_row("output_layer.weight", map=Wrong(rects)))
    assert "lm_head.weight is covered twice at row 10, column 0" in message


# lm_head.weight is 20 x 12. Of each case the areas add up to 240.
HIDDEN = {
    # Columns 0-5 down to row 19; beside them columns 6-11 of rows 0-8 and 10-19, and row 12 of the left half once more.
    "overlap_of_rectangles_that_are_not_neighbours": (
        Rect(0, 0, 0, 20, 6, 0, 0),
        Rect(0, 0, 6, 9, 6, 0, 0),
        Rect(0, 12, 0, 1, 6, 0, 0),
        Rect(0, 10, 6, 10, 6, 0, 0),
    ),
    "beyond_the_last_row": (Rect(0, 1, 0, 20, 12, 0, 0),),
    "beyond_the_last_column": (Rect(0, 0, 6, 20, 12, 0, 0),),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_rectangles_whose_areas_add_up_but_do_not_cover_are_refused_by_name(case):
    assert "lm_head.weight" in refusal(with_row("output_layer.weight", map=Wrong(HIDDEN[case])))


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        (Sizes(pipeline=4), r"trainer\.pipeline 4 does not divide the model's 2 layers"),
        (Sizes(expert=3, data=3), r"trainer\.expert 3 does not divide the model's 4 experts"),
        (Sizes(tensor=3), r"20 cannot be split over 3 ranks"),
        (Sizes(data=20, expert_tensor=20), r"10 cannot be split over 20 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_number(sizes, numbers):
    with pytest.raises(SlimxError, match=numbers):
        check_coverage(TABLE, sizes, places_of(sizes))


def test_more_tensor_ranks_than_query_groups_are_refused_with_the_number():
    with pytest.raises(SlimxError, match="query groups of 2 cannot be split over 4 ranks"):
        InterleaveQKV(heads=4, groups=2, head_dim=3).local([(12, 5), (6, 5), (6, 5)], 0, 0, 4)


def test_a_concatenation_over_rows_is_not_split_over_columns():
    with pytest.raises(SlimxError, match="split it over axis 0"):
        Concat().local([(4, 6), (4, 6)], 1, 0, 2)
