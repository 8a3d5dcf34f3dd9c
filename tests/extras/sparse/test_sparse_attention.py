"""DeepSeek-V3.2 and GLM-5: what the tables name, what is not trained, what is refused, and what sparse attention
costs. Against transformers: tests/integration/test_families.py."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
)

from slimx.config.rule import all_rules, broken
from slimx.config.schema import Config
from slimx.config.sections.run import Cluster
from slimx.config.sections.trainer import Trainer
from slimx.extras.families import deepseek_v3
from slimx.extras.planner.memory.activations import Setting
from slimx.extras.planner.memory.batch_plan import batch_plan
from slimx.extras.planner.memory.engine import kv_bytes
from slimx.extras.planner.memory.pipeline import activation_bytes
from slimx.extras.planner.memory.trainer import holdings, trainer_memory
from slimx.extras.planner.plan.splits import splits
from slimx.extras.sparse import deepseek_v32, glm_moe_dsa
from slimx.extras.sparse.layers import SparseAttention, period
from slimx.layout.engine import EngineLayout
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import ModelSpec, read_model
from slimx.models.flops import sequence_flops
from slimx.models.layer_kind import LayerKind
from slimx.preflight.facts import model_facts
from slimx.preflight.hardware import machine_of
from slimx.reshard.plan.publication import publication_plan
from tests.refusals import invalid, refused
from tests.warm.sglang import run_with_sglang

ROOT = Path(__file__).parents[3]
V32, GLM_5 = (
    json.loads((ROOT / f"configs/moe/models/{name}/config.json").read_text()) for name in ("DeepSeek-V3.2", "GLM-5")
)
both = pytest.mark.parametrize("hf", [V32, GLM_5], ids=["V3.2", "GLM-5"])
FULL = {"granularity": "full", "method": "uniform", "layers": 1}
INDEXER = "self_attn.indexer."


def read(directory: Path, hf: dict[str, Any], **how: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(hf))
    return read_model(directory, **how)


def small(hf: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Five layers of four experts."""
    return {**hf, "num_hidden_layers": 5, "n_routed_experts": 16, "num_nextn_predict_layers": 0, **fields}


def run(directory: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(directory)},
            "model": {"path": str(directory)},
            "numerics": {"dtype": "bfloat16"},
            "rollout": {"prompts": "p", "engines": [{"name": "actor"}]},
            **sections,
        }
    )


# The published checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hf", "count"), [(V32, 685.4), (GLM_5, 755.8)], ids=["V3.2", "GLM-5"])
def test_parameters_are_as_many_as_the_published_files_hold(tmp_path: Path, hf: dict[str, Any], count: float):
    """With the layer of multi-token prediction and its copies of embedding and output."""
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


def test_the_engines_own_models_hold_what_the_tables_say(tmp_path: Path):
    """SGLang's classes as it builds them for CUDA: names, shapes and dtypes of all parameters, and where they are."""
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
    ran = run_with_sglang("-m", "tests.unit.models.sglang_on_meta", *(str(spec.path) for spec in specs))
    assert ran.returncode == 0, ran.stderr[-2000:]
    for spec, found in zip(specs, json.loads(ran.stdout.splitlines()[-1]), strict=True):
        parts = list(EngineLayout(spec.engine_table(), EngineSizes()).parts())
        assert found["parameters"] == {part.name: [list(part.shape), part.dtype or "bfloat16"] for part in parts}
        assert found["uncovered"] == {}
        assert found["places"] == {name: list(shape) for name, shape in spec.table.checkpoint_shapes().items()}


# The indexer ----------------------------------------------------------------------------------------------------------


@both
def test_the_indexer_and_nothing_else_is_not_trained(tmp_path: Path, hf: dict[str, Any]):
    spec = read(tmp_path, small(hf, num_nextn_predict_layers=1), mtp_layers=1)
    own = {name for name in spec.table.checkpoint_shapes() if INDEXER in name}
    assert len(own) == 5 * 6
    assert {name for sources in spec.frozen(()) for name in sources} == own
    given = spec.frozen(("*.input_layernorm.weight",))
    assert {name for sources in given for name in sources} - own == {
        f"model.layers.{layer}.input_layernorm.weight" for layer in range(6)
    }
    config = run(tmp_path)
    runs = holdings(config.trainer, config.numerics, spec).runs(Sizes(), 0)
    assert {each.name for each in runs if each.parameter and not each.trained} == {
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
def test_what_was_never_tried_with_sparse_attention_is_refused(tmp_path: Path, trainer: dict[str, Any], problems):
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


def test_a_layer_of_multi_token_prediction_neither_takes_nor_leaves_a_choice():
    """It bears the number of the decoder's first layer."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from slimx.extras.sparse.adapters.megatron.sparse import SparseSequences
    from slimx.trainer.model.policy_model import bounds_alone

    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": 5}
    plain = PackedSeqParams(**given)
    plain._dsa_index_share_topk_holder = {1: torch.zeros(1, 8, 5)}  # as layers that share a choice leave it
    for sequences in (plain, SparseSequences(**given, chosen={1: torch.zeros(1, 8, 5)})):
        alone = bounds_alone(sequences)
        assert type(alone) is PackedSeqParams
        assert {name: vars(alone)[name] for name in given} == given
        assert vars(alone).keys() == {field.name for field in fields(PackedSeqParams)}


@pytest.mark.parametrize("encoding", ["hf", "local"])
@both
def test_the_indexer_is_published_as_engines_hold_it(tmp_path: Path, hf: dict[str, Any], encoding: str):
    """The norm in fp32, and what is no fp8 there not in fp8 either."""
    spec = read(tmp_path, small(hf))
    config = run(tmp_path, publish={"encoding": encoding, "quantise": "triton"})
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
def test_what_cannot_be_built_is_refused_by_its_field(tmp_path: Path, hf: dict[str, Any], field: str, value: Any):
    with refused("model.unsupported", about=field):
        read(tmp_path, hf | {field: value})


@pytest.mark.parametrize("types", [["full", "sparse"] * 39, "F" * 77 + "X", "FS"], ids=str)
def test_types_of_indexers_that_no_model_has_are_refused(tmp_path: Path, types: list[str] | str):
    key = "indexer_types" if isinstance(types, list) else "index_topk_pattern"
    with refused("model.field"):
        read(tmp_path, GLM_5 | {key: types})


# Layers that share a choice (GLM-5.2) ---------------------------------------------------------------------------------

SHARED = small(GLM_5, num_hidden_layers=11, index_topk_freq=4, index_skip_topk_offset=3)
"""Indexers in the layers 0, 1, 2, 6 and 10."""


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"indexer_types": [{"F": "full", "S": "shared"}[kind] for kind in "FFFSSSFSSSF"], "index_topk_freq": 7},
        {"index_topk_pattern": "FFFSSSFSSSF"},
        {
            "indexer_types": [{"F": "full", "S": "shared"}[kind] for kind in "FFFSSSFSSSF"],
            "index_topk_pattern": "FFFSSSFSSSF",  # as transformers saves a model that was made of a pattern
        },
    ],
    ids=lambda fields: " ".join(fields),
)
def test_layers_that_share_a_choice_are_those_of_transformers(tmp_path: Path, fields: dict[str, Any]):
    hf = small(GLM_5, num_hidden_layers=11, num_nextn_predict_layers=1, **fields)
    spec = read(tmp_path, hf, mtp_layers=1)
    theirs = GlmMoeDsaConfig(**{key: value for key, value in hf.items() if key != "architectures"}).indexer_types
    assert spec.layer_kind.indexers == tuple(kind == "full" for kind in theirs)
    offset, every = (spec.transformer[f"dsa_indexer_{name}"] for name in ("skip_topk_offset", "topk_freq"))
    skips = [is_dsa_skip_topk_layer(layer, offset, every) for layer in range(1, 12)]
    assert skips == [kind == "shared" for kind in theirs]
    holders = {int(name.split(".")[2]) for name in spec.table.checkpoint_shapes() if INDEXER in name}
    assert holders == {0, 1, 2, 6, 10, 11}, "the layer of multi-token prediction has an indexer"


def test_a_period_is_found_for_any_that_megatron_core_knows():
    for offset, every, layers in product((1, 2, 3, 5), (1, 2, 4), (4, 9, 13)):
        has = tuple(not is_dsa_skip_topk_layer(layer, offset, every) for layer in range(1, layers + 1))
        found = period(has)
        assert has == tuple(not is_dsa_skip_topk_layer(layer, found[1], found[0]) for layer in range(1, layers + 1))
    assert period((True, False, True, True, False)) is None


@pytest.mark.parametrize(
    ("split", "fits"),
    [
        ((3, 8), False),
        ((6, 5), True),
        ((2, 4, 4, 1), True),
        ((2, 3, 5, 1), False),
        ((6, 5, 0), True),
        ((12, 3), True),  # no layers so many: another rule's
    ],
    ids=str,
)
def test_a_stage_that_begins_with_anothers_choice_is_refused(tmp_path: Path, split: tuple[int, ...], fits: bool):
    spec = read(tmp_path, SHARED)
    facts = {"sizes": Sizes(pipeline=len(split), split=split), "spec": spec}
    found = broken(spec.layer_kind.split_rules(), facts)
    assert {(problem.code, problem.about) for problem in found} == (
        set() if fits else {("sparse.shared_stage", "trainer.layers_per_stage")}
    )


def test_layers_of_multi_token_prediction_that_would_share_are_refused(tmp_path: Path):
    with refused("model.unsupported", about="num_nextn_predict_layers"):
        read(tmp_path, {**SHARED, "num_nextn_predict_layers": 2})


def test_a_shared_choice_stays_until_the_backward_pass_of_its_micro_batch(tmp_path: Path):
    """Eight bytes for each of the tokens that a query sees, whatever is computed again."""
    spec = read(tmp_path, SHARED)
    setting = Setting(tokens=100, length=100, sizes=Sizes(), itemsize=2, kernels="torch", materialised=True)
    every = SparseAttention((True,) * 11)
    kept = [
        activation_bytes(replace(spec, layer_kind=kind), trainer, Sizes(), setting, place=0, microbatches=1).kept
        for kind in (spec.layer_kind, every)
        for trainer in (Trainer(), Trainer.model_validate({"recompute": FULL}))
    ]
    assert kept[0] - kept[2] == kept[1] - kept[3] == 5 * 100 * 100 * 8


def test_suggested_stages_begin_with_an_indexer(tmp_path: Path):
    spec = read(tmp_path, SHARED)
    machine = machine_of(Cluster.model_validate({"gpu": "h100"}))
    found = [fields["layers_per_stage"] for fields in splits(run(tmp_path), spec, machine, 4) if fields["pipeline"] > 1]
    assert found
    for counts in found:
        assert {*accumulate(counts[:-1])} <= {0, 1, 2, 6, 10}


def test_shared_choices_cost_less_to_make_and_to_keep(tmp_path: Path):
    shared, full = (SparseAttention(has) for has in ((True, False) * 4, (True,) * 8))
    model = read(tmp_path, small(GLM_5, num_hidden_layers=8)).transformer
    parts = [kind.attention_flops(model, 8, 0) for kind in (shared, full, SparseAttention((False,) * 8))]
    assert parts[0].quadratic * 2 == parts[1].quadratic
    assert parts[1].linear - parts[0].linear == parts[0].linear - parts[2].linear > 0
    assert [kind.replay_bytes(model, 10, 20, (0, 1, 2, 3)) for kind in (shared, full)] == [2 * 800, 4 * 800]


def test_an_engine_is_refused_a_glm_that_it_would_misread():
    """transformers writes such files and rotates pairs, SGLang would rotate halves."""
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
    """By the difference between the model with an indexer and the one without; neither eager attention is sparse."""
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
    """Four bytes for each of 2048 tokens that each of a rank's tokens sees in each of its layers."""
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


def test_an_engine_caches_the_indexers_keys_beside_the_latents():
    """In fp8: 128 bytes and a scale per token and layer."""
    latent, sparse = (family.transformer_config(V32) for family in (deepseek_v3, deepseek_v32))
    bytes_of = {
        cache: [
            kv_bytes(model, kind, EngineSizes(), 2, cache)
            for model, kind in ((latent, LayerKind()), (sparse, SparseAttention((True,) * 5)))
        ]
        for cache in (None, "fp8_e4m3")
    }
    assert all(more - less == 61 * (128 + 4) for less, more in bytes_of.values())
