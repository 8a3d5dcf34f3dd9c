"""The DeepSeek-V3 table names every tensor of the family's checkpoints; a config that cannot be built is refused."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from slimx.extras.families.deepseek_v3 import transformer_config, unsupported, weight_table
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table
from slimx.models.families import read_model
from slimx.models.files.reader import CheckpointReader
from tests.published import DEEPSEEK_V3 as V3
from tests.refusals import refused

YARN = {key: value for key, value in V3["rope_scaling"].items() if "mscale" not in key}
KIMI_K2 = V3 | {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000,
    "rope_scaling": {**YARN, "factor": 32, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}
MOONLIGHT = KIMI_K2 | {
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "rope_scaling": None,
}
# No two dimensions alike, so that a transposed or exchanged one cannot pass.
TINY = V3 | {
    "vocab_size": 40,
    "hidden_size": 28,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 18,
    "q_lora_rank": 22,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
}


def size(shapes: Iterable[tuple[int, ...]]) -> float:
    """Returns the number of elements in billions."""
    return sum(math.prod(shape) for shape in shapes) / 1e9


# The published checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hf", "billions"), [(V3, 671), (KIMI_K2, 1026), (MOONLIGHT, 16)], ids=["V3", "Kimi-K2", "Moonlight"]
)
def test_parameters_are_as_many_as_the_published_models_count(hf: dict[str, Any], billions: int):
    assert round(size(weight_table(hf).checkpoint_shapes().values())) == billions


def test_the_prediction_layer_of_v3_is_trained_or_preserved():
    built, plain = weight_table(V3, 1), weight_table(V3)
    without = plain.checkpoint_shapes()
    assert len(without) == 45395
    added = {name: shape for name, shape in built.checkpoint_shapes().items() if name not in without}
    assert all(name.startswith("model.layers.61.") for name in added)
    assert plain.frozen == added and not built.frozen
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for table in (built, plain):
        assert dict(table.aliases) == {f"model.layers.61.{name}": original for name, original in shared.items()}


def test_v3_has_the_published_number_of_elements():
    table = weight_table(V3, 1)
    shapes = table.checkpoint_shapes()
    copies = [shapes[original] for original in table.aliases.values()]
    blocks = [
        tuple(-(-n // 128) for n in shapes[name])
        for entry in table.entries()
        if entry.row.quantized
        for name in entry.sources
    ]
    assert round(size([*shapes.values(), *copies, *blocks]), 2) == 684.53


def test_fp8_checkpoints_quantize_the_projections_in_blocks():
    rows = weight_table(V3, 1).rows
    kinds = {True: set(), False: set()}
    for row in rows:
        kinds[row.quantized] |= {re.sub(r"^.*[}.](?=\w+\.\w+$)", "", name) for name, _ in row.sources}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert kinds[True] == {f"{name}.weight" for name in attention | {"gate_proj", "up_proj", "down_proj"}}
    assert {"gate.weight", "eh_proj.weight", "lm_head.weight", "embed_tokens.weight"} <= kinds[False]
    (bias,) = {row.dtype for row in rows if row.name.endswith("expert_bias")}
    assert bias == "float32" and {row.dtype for row in rows if not row.name.endswith("expert_bias")} == {None}


# What transformers writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "first_k_dense_replace": 0},
        {"n_shared_experts": 2, "first_k_dense_replace": 3, "n_group": 1, "num_nextn_predict_layers": 0},
    ],
    ids=str,
)
def test_a_checkpoint_of_transformers_fits_the_table_tensor_by_tensor(tmp_path: Path, changes: dict[str, Any]):
    fields = {k: v for k, v in (TINY | changes).items() if k not in ("architectures", "quantization_config")}
    DeepseekV3ForCausalLM(DeepseekV3Config(**fields)).save_pretrained(tmp_path)
    spec = read_model(tmp_path)
    reader = CheckpointReader(tmp_path)
    reader.check(spec.table)
    saved = json.loads((tmp_path / "config.json").read_text())
    if saved["num_nextn_predict_layers"]:
        with refused("checkpoint.missing") as error:
            reader.check(read_model(tmp_path, mtp_layers=1).table)
        assert error.value.about.startswith("model.layers.4.")


# Layouts -----------------------------------------------------------------------------------------------------------

GRID = [
    Sizes(tensor=tensor, pipeline=pipeline, data=data, expert=expert, expert_tensor=expert_tensor)
    for tensor, pipeline, data, expert, expert_tensor in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 4), (1, 2))
    if tensor * data % (expert * expert_tensor) == 0
]


@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("hf", [TINY, TINY | {"q_lora_rank": None, "first_k_dense_replace": 2}], ids=["lora", "plain"])
def test_every_layout_holds_every_element_once(hf: dict[str, Any], mtp: int):
    table = weight_table(hf, mtp)
    for sizes in GRID:
        check_coverage(table.checkpoint_shapes(), MegatronLayout(table, sizes).parts())


def names_of(table: Table, sizes: Sizes, rank: int) -> set[str]:
    return {part.name for part in MegatronLayout(table, sizes).parts_of(rank)}


def test_the_last_stage_holds_the_embedding_again_for_its_prediction_layer():
    embedding, table = "embedding.word_embeddings.weight", weight_table(TINY, 1)
    (copy,) = [part for part in MegatronLayout(table, Sizes(pipeline=2)).parts_of(1) if part.name == embedding]
    assert copy.copy
    (original,) = [part for part in MegatronLayout(table, Sizes()).parts_of(0) if part.name == embedding]
    assert not original.copy
    assert embedding not in names_of(weight_table(TINY), Sizes(pipeline=2), 1)
    assert "mtp.layers.0.eh_proj.weight" not in names_of(table, Sizes(pipeline=2), 0)


def test_dense_and_expert_layers_are_counted_from_each_stages_first():
    table = weight_table(TINY | {"first_k_dense_replace": 3})
    last = names_of(table, Sizes(pipeline=2), 1)
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.expert_bias"} <= last
    assert not {"decoder.layers.0.mlp.router.weight", "decoder.layers.1.mlp.linear_fc1.weight"} & last


# Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hf", [V3, KIMI_K2, MOONLIGHT, TINY], ids=["V3", "Kimi-K2", "Moonlight", "tiny"])
def test_the_published_configs_are_supported(hf):
    assert unsupported(hf) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, "rope_scaling.mscale"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, "rope_scaling.mscale"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.0}}, "rope_scaling.attention_factor"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "norm_topk_prob"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config.format"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"head_dim": 128}, "head_dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_megatron_computes_differently_is_refused(tmp_path: Path, changes: dict[str, Any], named: str):
    (tmp_path / "config.json").write_text(json.dumps(V3 | changes))
    with refused("model.unsupported", about=named):
        read_model(tmp_path)


def test_too_many_prediction_layers_are_refused_with_both_numbers(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(V3))
    with refused("model.mtp_layers", about="trainer.megatron.mtp_num_layers"):
        read_model(tmp_path, mtp_layers=2)


def test_groups_are_named_to_megatron_only_where_they_exclude_experts():
    fields = [transformer_config(V3 | {"n_group": n, "topk_group": k}) for n, k in ((8, 4), (1, 1), (8, 8))]
    found = [(f["moe_router_num_groups"], f["moe_router_group_topk"]) for f in fields]
    assert found == [(8, 4), (None, None), (None, None)]


def test_fields_are_those_of_megatrons_configuration():
    from megatron.core.transformer import MLATransformerConfig

    for hf in (V3, MOONLIGHT):
        fields = transformer_config(hf)
        assert fields.keys() <= {*MLATransformerConfig.__dataclass_fields__}
    assert transformer_config(V3)["rope_type"] == "yarn" and transformer_config(MOONLIGHT)["rope_type"] == "rope"
