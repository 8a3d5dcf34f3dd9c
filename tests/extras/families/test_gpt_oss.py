"""gpt-oss: stacks of transposed experts, MXFP4, where SGLang holds the tensors, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slimx.config.rule import broken
from slimx.config.schema import Config
from slimx.extras.families import gpt_oss
from slimx.extras.low_precision.rules import starts_in_plain_values
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Deinterleave, Once
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.parts import Part, check_coverage
from slimx.layout.patterns import select
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Row, Table, checkpoint_parts
from slimx.models.families import read_model
from slimx.models.flops import sequence_flops
from slimx.models.layer_kind import LayerKind
from slimx.reshard.plan.copy_plan import compile_plan
from slimx.reshard.plan.publication import PublicationPlan, publication_plan
from slimx.rules.layout import sizes_divide
from slimx.trainer.device.backends import choose_backends
from tests.extras.families.gpt_oss_stand import HF, NUMBERED, TABLE, sources
from tests.refusals import refused
from tests.unit.layout.layout_stand import Tensors
from tests.unit.reshard.plan_oracle import carry_out


@pytest.fixture(scope="module")
def whole() -> Tensors:
    return NUMBERED


def shards_of(parts: list[Part], whole: Tensors, ranks: int) -> list[Tensors]:
    """Shards of every trainer rank, cut by its rectangles."""
    out: list[Tensors] = [{} for _ in range(ranks)]
    for part in parts:
        local = torch.zeros(part.matrix, dtype=torch.int64)
        for r in part.rects:
            source = whole[part.sources[r.source]]
            source = source.reshape(len(source), -1)
            rows = source[r.row : r.row + (r.rows - 1) * r.step + 1 : r.step]
            local[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] = rows[
                :, r.col : r.col + r.cols
            ]
        for rank in part.ranks:
            out[rank][part.name] = local.view(part.shape)
    return out


TRAINERS = [Sizes(), Sizes(tensor=2, pipeline=2, expert=2), Sizes(data=4, expert=4)]


@pytest.mark.parametrize("sizes", TRAINERS, ids=str)
def test_gate_and_up_part_and_every_source_has_one_place(whole, sizes):
    parts = list(MegatronLayout(TABLE, sizes).parts())
    check_coverage(TABLE.sources(), parts)
    ranks = shards_of(parts, sources(whole), sizes.world)
    at = "decoder.layers.0.mlp.experts.linear_fc1."
    first = whole["model.layers.0.mlp.experts.gate_up_proj"][0]
    assert torch.equal(ranks[0][at + "weight0"], torch.cat([first[:, 0::2].T, first[:, 1::2].T]))
    bias = whole["model.layers.0.mlp.experts.gate_up_proj_bias"][0]
    assert torch.equal(ranks[0][at + "bias0"], torch.cat([bias[0::2], bias[1::2]]))
    down = whole["model.layers.0.mlp.experts.down_proj"][0]
    assert torch.equal(ranks[0]["decoder.layers.0.mlp.experts.linear_fc2.weight0"], down.T)


@pytest.mark.parametrize("sizes", TRAINERS, ids=str)
def test_an_export_puts_every_stack_together_again(whole, sizes):
    parts = list(MegatronLayout(TABLE, sizes).parts())
    plan = compile_plan(parts, checkpoint_parts(TABLE), precision=Precision("bfloat16", "bfloat16"), bucket_bytes=2**40)
    (found,) = carry_out_columns(plan, shards_of(parts, sources(whole), sizes.world))
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        made = found[name].transpose(-2, -1) if name in TABLE.transposed() else found[name]
        assert torch.equal(made, tensor), name


def carry_out_columns(plan: Any, trainers: list[Tensors]) -> list[Tensors]:
    """Calls `carry_out` where stacks of vectors are read as columns, in their own shapes."""
    shapes = [{t.name: t.shape for bucket in target for t in bucket.tensors} for target in plan.buckets]
    for target in plan.buckets:
        for k, bucket in enumerate(target):
            tensors = tuple(
                type(t)(t.name, t.dtype, (*t.shape, 1), t.offset, t.nbytes, t.scale_of, t.column) if t.column else t
                for t in bucket.tensors
            )
            target[k] = type(bucket)(tensors, bucket.size)
    made = carry_out(plan, trainers)
    return [{n: t.reshape(s[n]) for n, t in rank.items()} for rank, s in zip(made, shapes, strict=True)]


@pytest.mark.parametrize(
    "engine", [EngineSizes(), EngineSizes(tensor=2), EngineSizes(tensor=4, expert=2), EngineSizes(tensor=4)], ids=str
)
def test_each_engine_rank_receives_what_sglang_cuts_out_for_it(whole, engine):
    parts, table = list(MegatronLayout(TABLE, Sizes(tensor=2, expert=2)).parts()), gpt_oss.engine_table(HF)
    plan = compile_plan(
        parts,
        EngineLayout(table, engine).parts(),
        precision=Precision("bfloat16", "bfloat16"),
        bucket_bytes=2**40,
        ranks=engine.world,
    )
    assert plan.unread == ()
    forms = {t.name: (t.dtype, t.shape) for t in plan.buckets[0][0].tensors}
    found = carry_out_columns(plan, shards_of(parts, sources(whole), 2))
    for rank, tensors in enumerate(found):
        owner, shard = divmod(rank, engine.expert_tensor)
        count = 4 // engine.expert
        experts = slice(owner * count, (owner + 1) * count)
        at, there = "model.layers.1.mlp.experts.", "model.layers.1.mlp.experts."
        # `GptOssForCausalLM._load_normal_weights` transposes and FusedMoE narrows.
        both = whole[there + "gate_up_proj"][experts].transpose(1, 2).chunk(engine.expert_tensor, 1)[shard]
        assert torch.equal(tensors[at + "w13_weight"], both)
        down = whole[there + "down_proj"][experts].transpose(1, 2).chunk(engine.expert_tensor, 2)[shard]
        assert torch.equal(tensors[at + "w2_weight"], down)
        bias = whole[there + "gate_up_proj_bias"][experts].chunk(engine.expert_tensor, 1)[shard]
        assert torch.equal(tensors[at + "w13_weight_bias"], bias)
        bias = whole[there + "down_proj_bias"][experts] * (shard == 0)
        assert torch.equal(tensors[at + "w2_weight_bias"], bias)
        sinks = whole["model.layers.1.self_attn.sinks"].chunk(engine.tensor)[rank]
        assert torch.equal(tensors["model.layers.1.self_attn.sinks"], sinks)
        assert torch.equal(
            tensors["model.layers.1.self_attn.o_proj.bias"], whole["model.layers.1.self_attn.o_proj.bias"]
        )
    assert forms["model.layers.0.mlp.experts.w2_weight_bias"] == ("float32", (4 // engine.expert, 64))
    assert forms["model.layers.0.self_attn.sinks"][0] == "bfloat16"


def test_alternating_rows_are_split_by_pairs_and_summed_biases_kept_once():
    for size in (1, 2):
        for rank in range(size):
            shape, rects = Deinterleave().local([(8, 3)], 0, rank, size)
            assert shape == (8 // size, 3)
            rows = [r.row + k * r.step for r in rects for k in range(r.rows)]
            gates = list(range(0, 8, 2))[rank * 4 // size :][: 4 // size]
            assert rows == gates + [row + 1 for row in gates]
            assert (Once().local([(8, 1)], 0, rank, size)[1] == []) is (rank > 0)
    Table((Row("a", (("b", (8, 3)),), Deinterleave(), 0),), layers=1, experts=0)
    with refused("maps.share", about="a number of rows that alternate"):
        Deinterleave().local([(7, 3)], None, 0, 1)


def test_a_pattern_names_a_stack_as_the_checkpoint_does():
    found = select(TABLE, ["model.layers.1.mlp.experts.down_proj"], "trainer.freeze")
    assert found == {(f"model.layers.1.mlp.experts.down_proj[{k}].T",) for k in range(4)}


def test_attention_over_a_window_costs_the_window():
    transformer, tokens, window = gpt_oss.transformer_config(HF), 10_000, 128
    flops = sequence_flops(transformer, 128, LayerKind())
    alike = sequence_flops({**transformer, "window_size": None}, 128, LayerKind())
    pairs = window * tokens - window * (window - 1) // 2  # of one layer; the other sees all
    saved = 6 * 2 * 8 * 6 * (tokens * tokens / 2 - pairs)
    assert alike(tokens) - flops(tokens) == pytest.approx(saved, rel=1e-3)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {**HF["rope_scaling"], "mscale": 0.7}}, "rope_scaling.mscale"),
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"attention_bias": False}, "attention_bias"),
        ({"intermediate_size": 100}, "intermediate_size"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_an_unsupported_model_is_refused_by_its_setting(tmp_path: Path, change, named):
    (tmp_path / "config.json").write_text(json.dumps({**HF, **change}))
    with refused("model.unsupported", about=named):
        read_model(tmp_path)


def test_the_published_sizes_give_the_published_numbers_of_parameters():
    """21B and 117B, by the model card."""
    common = {**HF, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "vocab_size": 201088}
    common |= {"num_attention_heads": 64, "num_key_value_heads": 8}
    for layers, experts, billions in ((24, 32, 20.9), (36, 128, 116.8)):
        table = gpt_oss.weight_table({**common, "num_hidden_layers": layers, "num_local_experts": experts})
        count = sum(torch.Size(shape).numel() for shape in table.checkpoint_shapes().values())
        assert round(count / 1e9, 1) == billions


def published(
    tmp_path: Path, device: str, hf: dict[str, Any], publish: dict[str, Any], **sglang: Any
) -> PublicationPlan:
    """Returns the plan of a run whose engine has these arguments of SGLang."""
    (tmp_path / "config.json").write_text(json.dumps(hf))
    return publication_plan(configured(tmp_path, publish, **sglang), read_model(tmp_path), Sizes(), device)


def configured(tmp_path: Path, publish: dict[str, Any], **sglang: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "numerics": {"dtype": "bfloat16"},
            "rollout": {"prompts": "p", "engines": [{"name": "actor", "sglang": sglang}]},
            "publish": publish,
        }
    )


def test_engines_use_a_local_layout_only_with_a_known_kernel(tmp_path: Path):
    plan = published(tmp_path, "cuda", HF, {}, **gpt_oss.ENGINE_ARGUMENTS)
    assert plan.encoding == "local" and plan.plan.unread == ()


@pytest.mark.parametrize(
    ("device", "hf", "publish", "sglang", "code", "about"),
    [
        ("cpu", HF, {}, gpt_oss.ENGINE_ARGUMENTS, "publish.no_cpu_engine", "GptOssForCausalLM"),
        ("cuda", HF, {}, {}, "publish.engine_argument", "rollout.engines.sglang.moe_runner_backend"),
        ("cuda", HF, {"encoding": "hf"}, gpt_oss.ENGINE_ARGUMENTS, "publish.transposed", "publish.encoding"),
    ],
)
def test_engines_that_cannot_be_published_to_are_refused(tmp_path: Path, device, hf, publish, sglang, code, about):
    with refused(code, about=about):
        published(tmp_path, device, hf, publish, **sglang)


def test_engines_that_would_keep_experts_in_mxfp4_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**HF, "quantization_config": {"quant_method": "mxfp4"}}))
    facts = {"served": configured(tmp_path, {}).served, "spec": read_model(tmp_path)}
    assert ("publish.mxfp4", "model.path") in {(p.code, p.about) for p in broken([starts_in_plain_values], facts)}


def test_experts_with_biases_are_not_split_among_ranks(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    facts = {"sizes": Sizes(tensor=2, expert_tensor=2), "spec": read_model(tmp_path)}
    (problem,) = broken([sizes_divide], facts)
    assert (problem.code, problem.about) == ("layout.divides", "trainer.expert_tensor")


def test_kernels_that_cannot_compute_sinks_are_refused(tmp_path: Path):
    from slimx.trainer.model.transformer import transformer_config  # imports megatron-core

    (tmp_path / "config.json").write_text(json.dumps(HF))
    config = Config.model_validate(
        {"run": {"dir": "r"}, "model": {"path": str(tmp_path)}, "rollout": {"prompts": "p", "engines": [{}]}}
    )
    backends = choose_backends(config.trainer, device="cpu", packages=())
    assert transformer_config(read_model(tmp_path), config, backends, cpu=True).softmax_type == "learnable"
    with refused("trainer.attention_sinks", about="trainer.attention"):
        transformer_config(read_model(tmp_path), config, replace(backends, attention="fused"), cpu=True)
