"""Families of vision-language models: tensors, frozen parts, and refused configurations. Against transformers and
SGLang: tests/integration/test_families.py, tests/integration/test_engine_ranks.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slimx.extras.vision.nesting import nested_table, separate_experts
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.reshard.plan.publication import publication_plan
from tests.extras.vision.vision_stand import FAMILIES, changed, read, run, seeing
from tests.integration.engine_families import MODELS
from tests.refusals import refused

every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_engines_and_trainers_hold_every_tensor_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    spec = read(tmp_path, MODELS[name])
    engine = EngineLayout(spec.engine_table(), EngineSizes(tensor=2))
    check_coverage(spec.table.sources(), EngineLayout(spec.engine_table(), EngineSizes()).parts())
    taken = {source for part in engine.parts() for source in part.sources}
    assert taken == set(spec.table.sources())
    layout = MegatronLayout(spec.table, Sizes(pipeline=spec.table.layers))
    first = {part.name for part in layout.parts_of(0)}
    last = {part.name for part in layout.parts_of(spec.table.layers - 1)}
    assert any(part.startswith("visual.") for part in first)
    assert not any(part.startswith("visual.") for part in last)


@pytest.mark.parametrize(
    ("train", "frozen", "trained"),
    [
        ("none", ["visual.blocks.0.norm1.weight", "visual.merger.linear_fc1.weight"], []),
        (
            "projector",
            ["visual.blocks.0.norm1.weight", "visual.pos_embed.weight"],
            ["visual.merger.linear_fc1.weight", "visual.deepstack_merger_list.1.norm.bias"],
        ),
        ("tower", [], ["visual.blocks.0.norm1.weight", "visual.merger.linear_fc1.weight"]),
    ],
)
def test_the_trained_part_of_the_tower_is_the_configured_one(tmp_path: Path, train: str, frozen, trained) -> None:
    spec = seeing(run(tmp_path, trainer={"vision": {"train": train}}))
    names = {source.removeprefix("model.") for sources in spec.frozen(()) for source in sources}
    assert set(frozen) <= names and not names & set(trained)
    assert not any(name.startswith("language_model") for name in names)


@every_family
def test_the_whole_tower_is_frozen_without_images(tmp_path: Path, name: str) -> None:
    spec = read(tmp_path, MODELS[name])
    frozen = {source for sources in spec.frozen(()) for source in sources}
    assert frozen == {source for source in spec.table.sources() if source.startswith("model.visual.")}


@pytest.mark.parametrize(("top", "inside", "tied"), [(True, False, True), (False, True, False), (None, True, True)])
def test_embeddings_are_tied_as_the_top_level_says(tmp_path: Path, top, inside, tied: bool) -> None:
    hf = changed("qwen3_vl", "text_config", "tie_word_embeddings", value=inside)
    hf.pop("tie_word_embeddings")
    spec = read(tmp_path, hf if top is None else {**hf, "tie_word_embeddings": top})
    assert ("lm_head.weight" in spec.table.aliases) == tied
    assert spec.gpt["share_embeddings_and_output_weights"] == tied


@pytest.mark.parametrize(
    ("name", "path", "value", "code", "about"),
    [
        ("qwen3_vl", ("language_model_only",), True, "model.unsupported", "language_model_only"),
        ("qwen3_vl", ("text_config", "attention_bias"), True, "model.unsupported", "text_config.attention_bias"),
        ("qwen3_vl", ("text_config", "odd"), 1, "model.field_unread", "text_config.odd"),
        ("qwen3_vl", ("vision_config",), None, "model.field_missing", "vision_config"),
        ("qwen3_vl", ("vision_config", "depth"), "3", "model.field", "vision_config.depth"),
        ("qwen3_vl_moe", ("text_config", "norm_topk_prob"), False, "model.unsupported", "text_config.norm_topk_prob"),
        (
            "qwen3_5_published",
            ("vision_config", "deepstack_visual_indexes"),
            [1],
            "model.unsupported",
            "vision_config.deepstack_visual_indexes",
        ),
    ],
)
def test_a_configuration_that_would_be_misread_is_refused(tmp_path: Path, name, path, value, code, about) -> None:
    with refused(code, about=about):
        read(tmp_path, changed(name, *path, value=value))


def test_axes_that_do_not_fit_the_heads_are_refused(tmp_path: Path) -> None:
    config = run(tmp_path)
    hf = changed("qwen3_vl", "text_config", "rope_scaling", "mrope_section", value=[8, 4, 3])
    read(tmp_path, hf)
    with refused("vision.sections", about="mrope_section"):
        seeing(config)


def test_a_model_without_a_tower_is_refused_with_images(tmp_path: Path) -> None:
    config = run(tmp_path)
    read(tmp_path, MODELS["qwen3"])
    with refused("model.no_vision", about="trainer.vision"):
        seeing(config)


def test_transposed_experts_are_published_in_each_encoding(tmp_path: Path) -> None:
    """With Hugging Face names each projection of an expert is a tensor, also if engines of two layouts require them."""
    config = run(tmp_path, "qwen3_vl_moe")
    spec = seeing(config)
    assert publication_plan(config, spec, Sizes(), "cuda").encoding == "local"
    text = spec.hf["text_config"]
    wide, narrow = text["hidden_size"], text["moe_intermediate_size"]
    engines = [{"name": "a"}, {"name": "b", "tensor": 2}]
    named = {"publish": {"encoding": "hf"}}, {"rollout": {"prompts": "p", "engines": engines}}
    for sections, sizes in zip(named, (Sizes(tensor=2), Sizes()), strict=True):
        published = publication_plan(run(tmp_path, "qwen3_vl_moe", **sections), spec, sizes, "cuda")
        assert published.encoding == "hf"
        tensors = [tensor for bucket in published.plan.buckets[0] for tensor in bucket.tensors]
        experts = {tensor.name: tuple(tensor.shape) for tensor in tensors if ".experts." in tensor.name}
        assert len(experts) == 3 * text["num_experts"] * text["num_hidden_layers"]
        for name, shape in experts.items():
            assert shape == ((wide, narrow) if name.endswith(".down_proj.weight") else (narrow, wide))
        rest = {tensor.name for tensor in tensors} - experts.keys()
        assert rest == {name for name in spec.table.checkpoint_shapes() if ".experts." not in name}


def test_stacks_of_experts_are_separated_into_the_tensors_that_were_stacked(tmp_path: Path) -> None:
    text = dict(MODELS["qwen3_vl_moe"]["text_config"])
    text.pop("rope_scaling")
    table = read(tmp_path, {**text, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}).table
    expected = tuple(replace(row, quantized=False) for row in nested_table(table, ()).rows)
    for stack in ("stacked", "transposed"):
        rows = separate_experts(nested_table(table, (), stack)).rows
        assert tuple(replace(row, quantized=False) for row in rows) == expected
