"""A trainer rank holds what Megatron puts there, under any parallel sizes, against tensors built by plain torch."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import replace

import pytest
import torch

from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.ranks import Sizes
from tests.refusals import refused
from tests.unit.layout.layout_stand import (
    LAYOUTS,
    MODELS,
    assert_same,
    by_rank,
    checkpoint,
    fill,
    layouts,
    megatron_rank,
    name_of,
    places,
    split_of,
)


@pytest.mark.parametrize("model", ["qwen", "deepseek-mtp", "glm", "minimax"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=name_of)
def test_ranks_together_hold_every_element_once(model: str, sizes: Sizes):
    tiny = MODELS[model]
    whole, split = checkpoint(tiny), split_of(tiny, sizes)
    layout = MegatronLayout(tiny.table, replace(sizes, split=split))
    parts = list(layout.parts())
    filled = {id(part): fill(part, whole) for part in parts}
    expected = functools.cache(lambda place: megatron_rank(tiny, whole, sizes, place, split))
    for rank, (place, local) in enumerate(zip(places(sizes), by_rank(parts, sizes.world), strict=True)):
        assert_same({name: filled[id(part)] for name, part in local.items()}, expected(place), f"rank {rank}")
        if rank in (0, sizes.world - 1):
            assert {part.name: part for part in layout.parts_of(rank)} == local
    check_coverage(tiny.table.checkpoint_shapes(), parts)
    owned = torch.cat([filled[id(part)].flatten() for part in parts if not part.copy])
    assert torch.equal(owned.sort().values, torch.arange(1, 1 + sum(tensor.numel() for tensor in whole.values())))


@pytest.mark.parametrize("sizes", layouts(3), ids=name_of)
def test_a_part_names_every_rank_that_holds_its_bytes_and_no_other(sizes: Sizes):
    """Replicas come from context, data and expert-data parallelism, and from tensors that no rank splits."""
    tiny = MODELS["deepseek-mtp"]
    where = places(sizes)
    for part in MegatronLayout(tiny.table, replace(sizes, split=split_of(tiny, sizes))).parts():
        assert list(part.ranks) == sorted(set(part.ranks))
        expert = ".experts." in part.name
        split = expert or any(k in part.name for k in ("up_proj.weight", "proj.weight", "embed", "output", "linear_fc"))
        if "down_proj" in part.name or "layer_norm" in part.name or (not split and "shared" not in part.name):
            keys = {where[rank].pipeline for rank in part.ranks}
            group = [r for r, place in enumerate(where) if place.pipeline in keys]
        else:
            fields = ("expert", "expert_tensor", "pipeline") if expert else ("tensor", "pipeline")
            keys = {tuple(getattr(where[rank], field) for field in fields) for rank in part.ranks}
            group = [r for r, place in enumerate(where) if tuple(getattr(place, f) for f in fields) in keys]
        assert len(keys) == 1 and group == list(part.ranks), part.name


@pytest.mark.parametrize(
    ("sizes", "text", "split"),
    [
        (Sizes(pipeline=2, virtual=2), "Et|t*2||tL", (1, 2, 0, 1)),
        (Sizes(pipeline=2), "Et*3|tL", (3, 1)),
        (Sizes(pipeline=4), "E|tt|t|tL", (0, 2, 1, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_are_placed_as_in_megatrons_pipeline_layout(sizes: Sizes, text: str, split: tuple[int, ...]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    chunks = PipelineParallelLayerLayout(text, sizes.pipeline).layout
    expected, layer = {}, 0
    for chunk in range(sizes.virtual):
        for rank in range(sizes.pipeline):
            for local in range(chunks[rank][chunk].count(LayerType.decoder)):
                prefix = f"{chunk}." if sizes.virtual > 1 else ""
                expected[layer] = (rank,), f"{prefix}decoder.layers.{local}.mlp.router.weight"
                layer += 1
    parts = MegatronLayout(MODELS["qwen"].table, replace(sizes, split=split)).parts()
    found = [(part.ranks, part.name) for part in parts if part.name.endswith("router.weight")]
    assert found == [expected[layer] for layer in range(4)]


@pytest.mark.parametrize(
    ("sizes", "split", "code", "about", "numbers"),
    [
        (Sizes(pipeline=3), (), "layout.pipeline", "trainer.pipeline", [3, 4, 1, 2, 1]),
        (Sizes(pipeline=2, virtual=4), (), "layout.pipeline", "trainer.pipeline", [2, 4, 4, 0, 1, 1, 1, 1, 0, 0, 0]),
        (Sizes(pipeline=2), (1, 2), "layout.layers_per_stage", "trainer.layers_per_stage", [1, 2, 4, 2, 2, 2]),
        (Sizes(pipeline=2), (4,), "layout.layers_per_stage", "trainer.layers_per_stage", [4, 4, 2, 2, 2]),
        (Sizes(expert=3, data=3), (), "layout.experts", "trainer.expert", [3, 4]),
        (Sizes(tensor=2, expert=4), (), "layout.expert_ranks", "trainer.expert", [4, 1, 2]),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused_with_the_numbers(sizes, split, code, about, numbers):
    """The numbers that do not fit come first, then those of a split that does."""
    with refused(code, about=about) as caught:
        MegatronLayout(MODELS["qwen"].table, replace(sizes, split=split))
    assert [int(number) for number in re.findall(r"\d+", str(caught.value))] == numbers


def test_a_shard_that_does_not_divide_is_refused_with_the_number():
    with refused("layout.tensor", about="embedding.word_embeddings.weight"):
        list(MegatronLayout(MODELS["qwen"].table, Sizes(tensor=8)).parts())
