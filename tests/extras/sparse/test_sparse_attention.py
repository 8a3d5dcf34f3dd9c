"""DeepSeek-V3.2 and GLM-5: what the tables name, what is not trained, what is refused, and what sparse attention
costs. Against transformers: tests/integration/test_families.py."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
)

from slimx.config.rule import all_rules, broken
from slimx.extras.families import deepseek_v3
from slimx.extras.planner.batch_plan import batch_plan
from slimx.extras.planner.memory.engine import kv_bytes
from slimx.extras.planner.memory.trainer import holdings, trainer_memory
from slimx.extras.sparse import deepseek_v32, glm_moe_dsa
from slimx.extras.sparse.layers import SparseAttention
from slimx.layout.engine import EngineLayout
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.flops import sequence_flops
from slimx.models.layer_kind import LayerKind
from slimx.preflight.facts import model_facts
from slimx.reshard.plan.publication import publication_plan
from tests.extras.sparse.sparse_stand import GLM_5, INDEXER, V32, read, run, small
from tests.function_call import call_with_sglang
from tests.refusals import invalid, refused
from tests.unit.adapters.sglang_ranks import built, described, join, pretend_hopper

both = pytest.mark.parametrize("hf", [V32, GLM_5], ids=["V3.2", "GLM-5"])


# The published checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hf", "count"), [(V32, 685.4), (GLM_5, 755.8)], ids=["V3.2", "GLM-5"])
def test_parameters_are_as_many_as_the_published_files_hold(tmp_path: Path, hf: dict[str, Any], count: float):
    """Counts the layer of multi-token prediction and its copies of embedding and output as well."""
    table = read(tmp_path, hf).table
    shapes = table.checkpoint_shapes()
    repeated = [shapes[original] for original in table.aliases.values()]
    sizes = [*shapes.values(), *table.frozen.values(), *repeated]
    assert sum(math.prod(shape) for shape in sizes) / 1e9 == pytest.approx(count, abs=0.06)


@both
def test_an_engine_takes_every_tensor_of_the_checkpoint(hf: dict[str, Any]):
    family = {V32["architectures"][0]: deepseek_v32, GLM_5["architectures"][0]: glm_moe_dsa}[hf["architectures"][0]]
    table = family.engine_table(small(hf))
    taken = {name for part in EngineLayout(table, EngineSizes(tensor=4)).parts() for name in part.sources}
    assert taken == set(family.weight_table(small(hf)).checkpoint_shapes())


def served(path: str) -> dict[str, Any]:
    """Returns SGLang's model of `path`, described."""
    pretend_hopper()
    return described(built(join(path), "meta"))


def test_the_engines_models_have_the_tensors_of_the_tables(tmp_path: Path):
    """Checks SGLang's classes as built for CUDA: names, shapes and dtypes of all parameters, and their locations."""
    specs = []
    # SGLang's CPU builds no rotary embedding of pairs without scaling.
    yarn = {**V32["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000}
    sharing = {"index_topk_freq": 4, "index_skip_topk_offset": 1}
    for number, hf in enumerate(
        (V32, {**GLM_5, "rope_parameters": yarn}, {**GLM_5, "rope_parameters": yarn, **sharing})
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        specs.append(read(directory, small({**hf, "quantization_config": None})))
    for spec in specs:
        found = call_with_sglang(served, str(spec.path))
        parts = list(EngineLayout(spec.engine_table(), EngineSizes()).parts())
        assert found["parameters"] == {part.name: [list(part.shape), part.dtype or "bfloat16"] for part in parts}
        assert found["uncovered"] == {}
        assert found["places"] == {name: list(shape) for name, shape in spec.table.checkpoint_shapes().items()}


# The indexer ----------------------------------------------------------------------------------------------------------


@both
def test_the_indexer_and_nothing_else_is_not_trained(tmp_path: Path, hf: dict[str, Any]):
    spec = read(tmp_path, small(hf, num_nextn_predict_layers=1), mtp_layers=1)
    names = {name for name in spec.table.checkpoint_shapes() if INDEXER in name}
    assert len(names) == 5 * 6
    assert {name for sources in spec.frozen(()) for name in sources} == names
    frozen = spec.frozen(("*.input_layernorm.weight",))
    assert {name for sources in frozen for name in sources} - names == {
        f"model.layers.{layer}.input_layernorm.weight" for layer in range(6)
    }
    config = run(tmp_path)
    runs = holdings(config.trainer, config.numerics, spec).runs(Sizes(), 0)
    assert {run.name for run in runs if run.parameter and not run.trained} == {
        row.name for row in spec.table.rows if "core_attention.indexer" in row.name
    }


def test_choices_of_an_engines_indexer_are_refused(tmp_path: Path):
    with invalid("sparse.engine_choice", about="trainer.indexer_replay"):
        run(tmp_path, trainer={"indexer_replay": "R3"})


@pytest.mark.parametrize(
    ("trainer", "problems"),
    [
        ({}, []),
        ({"megatron": {"dsa_indexer_loss_coeff": 0.0}}, []),
        ({"megatron": {"dsa_indexer_loss_coeff": 0.01}}, ["sparse.indexer_loss"]),
        ({"world_size": 2, "context": 2}, []),
        ({"indexer_replay": "R2"}, []),
        ({"megatron": {"mtp_num_layers": 1}}, []),
    ],
    ids=str,
)
def test_features_untried_with_sparse_attention_are_refused(tmp_path: Path, trainer: dict[str, Any], problems):
    mtp = trainer.get("megatron", {}).get("mtp_num_layers", 0)
    spec = read(tmp_path, small(V32, num_nextn_predict_layers=1), mtp_layers=mtp)
    config = run(tmp_path, trainer=trainer)
    found = [problem.code for problem in broken(all_rules(), model_facts(config, spec))]
    assert [code for code in found if code.startswith("sparse.")] == problems


def test_a_model_without_an_indexer_has_no_choice_to_replay(tmp_path: Path):
    hf = {**small(V32), "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    spec = read(tmp_path, {name: value for name, value in hf.items() if not name.startswith("index_")})
    (problem,) = broken(all_rules(), model_facts(run(tmp_path, trainer={"indexer_replay": "R2"}), spec))
    assert (problem.code, problem.about) == ("sparse.replay", "trainer.indexer_replay")


def test_a_prediction_layer_neither_shares_nor_provides_a_choice():
    """Gives it the number of the decoder's first layer, as megatron-core does."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from slimx.extras.sparse.adapters.megatron.sparse import SparseSequences
    from slimx.trainer.model.policy_model import bounds_alone

    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    bounds_of_sequences = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": 5}
    plain = PackedSeqParams(**bounds_of_sequences)
    plain._dsa_index_share_topk_holder = {1: torch.zeros(1, 8, 5)}  # as layers that share a choice leave it
    for sequences in (plain, SparseSequences(**bounds_of_sequences, chosen={1: torch.zeros(1, 8, 5)})):
        alone = bounds_alone(sequences)
        assert type(alone) is PackedSeqParams
        assert {name: vars(alone)[name] for name in bounds_of_sequences} == bounds_of_sequences
        assert vars(alone).keys() == {field.name for field in fields(PackedSeqParams)}


@pytest.mark.parametrize("encoding", ["hf", "local"])
@both
def test_the_indexer_is_published_as_engines_hold_it(tmp_path: Path, hf: dict[str, Any], encoding: str):
    """Checks that the norm is fp32, and that only tensors in fp8 there are in fp8."""
    spec = read(tmp_path, small(hf))
    config = run(tmp_path, publish={"encoding": encoding, "quantize": "triton"})
    plan = publication_plan(config, spec, Sizes(), "cuda").plan
    sent = {tensor.name: tensor.dtype for buckets in plan.buckets for bucket in buckets for tensor in bucket.tensors}
    kinds = {name.rpartition(INDEXER)[2]: dtype for name, dtype in sent.items() if INDEXER in name}
    separate, together = {"wk.weight", "weights_proj.weight"}, {"wk_weights_proj.weight"}
    glm = hf is GLM_5
    bf16 = together if glm and encoding == "local" else separate if glm else {"weights_proj.weight"}
    fp8 = {"wq_b.weight"} if glm else {"wq_b.weight", "wk.weight"}
    assert {name for name, dtype in kinds.items() if dtype == "bfloat16"} == bf16
    assert {name for name, dtype in kinds.items() if dtype == "float8_e4m3fn"} == fp8
    assert {f"{name.removesuffix('weight')}weight_scale_inv" for name in fp8} | {
        "k_norm.weight",
        "k_norm.bias",
    } == {name for name, dtype in kinds.items() if dtype == "float32"}


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hf", "field", "value"),
    [
        (V32, "indexer_rope_interleave", True),
        (V32, "q_lora_rank", None),
        (V32, "index_head_dim", 32),
        (V32, "layer_types", ["full_attention"] * 61),
        (GLM_5, "indexer_rope_interleave", False),
        (V32, "index_topk_freq", 4),
        (V32, "indexer_types", ["full"] * 60 + ["shared"]),
        (GLM_5, "indexer_types", ["full", "shared", "shared", "full", "shared", "full"] * 13),
        (GLM_5, "index_topk_pattern", "S" + 77 * "F"),
        (GLM_5, "mlp_layer_types", ["sparse"] * 78),
        (GLM_5, "attention_bias", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_model_is_refused_by_its_field(tmp_path: Path, hf: dict[str, Any], field: str, value: Any):
    with refused("model.unsupported", about=field):
        read(tmp_path, hf | {field: value})


def test_an_engine_is_refused_a_glm_that_it_would_misread():
    """Reads files as written by transformers, which rotates pairs where SGLang would rotate halves."""
    with refused("model.served_field", about="indexer_rope_interleave"):
        glm_moe_dsa.engine_table({key: value for key, value in GLM_5.items() if key != "indexer_rope_interleave"})


@both
def test_engines_on_the_cpu_and_exact_mode_are_refused(tmp_path: Path, hf: dict[str, Any]):
    spec = read(tmp_path, small(hf))
    with refused("publish.no_cpu_engine", about=hf["architectures"][0]):
        publication_plan(run(tmp_path), spec, Sizes(), "cpu")
    config = run(tmp_path, numerics={"dtype": "bfloat16", "mode": "exact"})
    assert "exact.architecture" in [problem.code for problem in broken(all_rules(), model_facts(config, spec))]


# Costs ----------------------------------------------------------------------------------------------------------------


def test_the_indexers_flops_are_those_that_torch_counts():
    """Takes the difference between the model with an indexer and the one without; eager attention of both is dense."""
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    index = {"index_n_heads": 6, "index_head_dim": 10, "index_topk": 5}

    def counted(model: torch.nn.Module, tokens: int) -> int:
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(tokens)[None] % 160).logits.sum().backward()
        return counter.get_total_flops()

    torch.manual_seed(0)
    sparse = DeepseekV32ForCausalLM(DeepseekV32Config(**sizes, **index))
    dense = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    hf = {**dense.config.to_dict(), **sizes, **index}
    found = sequence_flops(deepseek_v32.transformer_config(hf), 160, SparseAttention((True,) * hf["num_hidden_layers"]))
    plain = sequence_flops(deepseek_v3.transformer_config(hf), 160, LayerKind())
    chosen = 3 * 2 * 2 * 8 * (2 * 16 + 8) * 5  # three passes, two layers: each token sees five others in latent space
    for tokens in (16, 48):
        beyond = counted(sparse, tokens) - counted(dense, tokens)
        linear = found.linear - chosen - plain.linear
        assert beyond == pytest.approx(linear * tokens + 2 * found.quadratic * tokens**2, rel=1e-9)


def test_a_step_keeps_its_choice_of_tokens_in_host_memory(tmp_path: Path):
    """Counts four bytes for each of the 2048 tokens that each of a rank's tokens reads in each of its layers."""
    spec, layout = read(tmp_path, small(V32, num_hidden_layers=4)), {"world_size": 4, "pipeline": 2, "context": 2}
    sizes = Sizes(pipeline=2, context=2)
    rollout = {"prompts": "p", "engines": [{"name": "actor"}], "prompts_per_step": 6, "group_size": 4}
    kept = {}
    for replay in ("none", "R2"):
        trainer = layout | {"indexer_replay": replay, "max_tokens_per_microbatch": 8192}
        config = run(tmp_path, trainer=trainer, rollout=rollout, schedule={"updates_per_step": 2})
        plan = batch_plan(config, sizes)
        kept[replay] = trainer_memory(config, spec, sizes, "cuda")
    assert plan.microbatches_per_update > 1
    bytes_ = 4 * 2048 * (8192 // 2) * 2 * plan.microbatches_per_update * 2
    assert [stage.host_chosen for stage in kept["R2"]] == [bytes_] * 2
    assert [stage.host - bytes_ for stage in kept["R2"]] == [stage.host for stage in kept["none"]]


def test_an_engine_caches_indexer_keys_and_latents():
    """Counts fp8 keys: 128 bytes and a scale per token and layer."""
    latent, sparse = (family.transformer_config(V32) for family in (deepseek_v3, deepseek_v32))
    bytes_of = {
        cache: [
            kv_bytes(model, kind, EngineSizes(), 2, cache)
            for model, kind in ((latent, LayerKind()), (sparse, SparseAttention((True,) * 5)))
        ]
        for cache in (None, "fp8_e4m3")
    }
    assert all(more - less == 61 * (128 + 4) for less, more in bytes_of.values())
