"""Layers of multi-token prediction reach the draft model by which an engine speculates, and are proven there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimx.adapters.sglang.weights.draft_model import WithDraft, publishes_draft, take_draft
from slimx.adapters.sglang.weights.places import weights_of
from slimx.adapters.sglang.weights.receiver import receiver_of
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.engines.server.spec import EngineSpec, server_argv
from slimx.extras.families import deepseek_v3
from slimx.layout.engine import DRAFT, EngineLayout
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.models.families import read_model
from slimx.reshard.plan.publication import publication_plan
from tests.function_call import call_with_sglang
from tests.refusals import refused
from tests.unit.adapters.engine_model import Weights, rank_local
from tests.unit.adapters.receiver_stand import publish
from tests.unit.adapters.sglang_ranks import built, join

ROOT = Path(__file__).parents[3]
YARN = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
HF = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
SIZES, RANK = EngineSizes(tensor=2, expert=2), 1
SPOILT = "draft.model.decoder.mlp.experts.w2_weight"
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 1, "speculative_num_draft_tokens": 2}


GLM = {
    key: HF[key]
    for key in (
        *("torch_dtype", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "hidden_act"),
        *("num_hidden_layers", "first_k_dense_replace", "num_attention_heads", "n_routed_experts", "n_shared_experts"),
        *("num_experts_per_tok", "norm_topk_prob", "num_nextn_predict_layers", "rms_norm_eps", "rope_theta"),
        *("max_position_embeddings", "tie_word_embeddings", "routed_scaling_factor", "n_group", "topk_group"),
    )
} | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
}


def written(hf: dict[str, Any], out: Path) -> Path:
    """A checkpoint of random numbers for `hf`."""
    generator = torch.Generator().manual_seed(1)
    (out / "config.json").write_text(json.dumps(hf))
    shapes = read_model(out, mtp_layers=1).table.checkpoint_shapes()
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 of two layers and one of multi-token prediction."""
    return written(HF, tmp_path_factory.mktemp("drafted"))


def loaded(path: str, *, fused: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns target and draft with the weights of `path`, as a server that drafts has them before any request."""
    fusion = {"disable_shared_experts_fusion": not fused, "enforce_shared_experts_fusion": fused}
    arguments = join(path, RANK, SIZES.tensor, ep_size=SIZES.expert, **fusion)
    target, draft = models = [built(arguments, draft=is_draft) for is_draft in (False, True)]
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        model.load_weights(load_file(Path(path) / "model.safetensors").items())
    draft.set_embed_and_head(*target.get_embed_and_head())
    return target, draft


def wrong(target: torch.nn.Module, expected: Weights) -> list[str]:
    """Returns names of parameters of target and draft that are not as expected, or that only one side has."""
    found = weights_of(receiver_of(target).model)
    same = {name for name, tensor in expected.items() if name in found and torch.equal(found[name].data, tensor)}
    return sorted((found.keys() | expected.keys()) - same)


def drafting(path: str, fused: bool) -> dict[str, Any]:
    """Publishes to one rank of SGLang's model and the draft of its speculative decoding.

    Returns the parameters that are not what slimx's table says after SGLang's own `load_weights` ("loaded") and after a
    publication of other weights under the engine's own names ("published"), and what `verify` returns before and after
    one number of the draft is changed ("verified", "spoilt").
    """
    torch.cuda.synchronize = lambda: None  # as the plugin does on a server without CUDA
    target, draft = loaded(path, fused=fused)
    runner = SimpleNamespace(model=draft)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target)),
        draft_worker=SimpleNamespace(weight_update_runners=lambda: [("draft", runner)]),
    )
    take_draft(None, scheduler)
    table = read_model(path, mtp_layers=1).engine_table(draft=True, fused_shared_experts=fused)
    layout = EngineLayout(table, SIZES)
    before = load_file(Path(path) / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    after = {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in before.items()}
    local = rank_local(layout, after, RANK)
    found: dict[str, Any] = {"loaded": wrong(target, rank_local(layout, before, RANK))}
    publish(target, local, encoding="local")
    found |= {"published": wrong(target, local), "verified": receiver_of(target).verify()}
    found["kinds"] = [type(target).__name__, type(draft).__name__]
    found["drafted"] = sum(name.startswith(DRAFT) for name in local)
    found["shared"] = draft.lm_head.weight is target.lm_head.weight
    draft.get_parameter(SPOILT.removeprefix(DRAFT)).data.view(-1)[0] += 1
    return found | {"spoilt": receiver_of(target).verify()["differ"]}


@pytest.mark.parametrize(
    ("hf", "fused"),
    [
        pytest.param(HF, False, id="V3", marks=pytest.mark.slow("full grid of families")),
        pytest.param(HF, True, id="V3-fused"),
        pytest.param(GLM, False, id="GLM-4.5", marks=pytest.mark.slow("full grid of families")),
    ],
)
def test_sglangs_draft_gets_the_trained_layer_and_errors_in_it_are_found(
    hf: dict[str, Any], fused: bool, tmp_path: Path
) -> None:
    """Two accounts of the draft: SGLang's loader, and the table that publications are planned with."""
    path = written(hf, tmp_path)
    found = call_with_sglang(drafting, str(path), fused)
    assert found["kinds"] == [hf["architectures"][0], f"{hf['architectures'][0]}NextN"]
    assert found["loaded"] == found["published"] == []
    assert found["verified"]["differ"] == found["verified"]["missing"] == []
    rows = read_model(path).family.draft_rows(hf, fused_shared_experts=fused)
    assert found["shared"] and found["drafted"] == len(rows)
    assert found["spoilt"] == [SPOILT]


def configured(model: Path, *changes: str, **sglang: object) -> Config:
    return load_config(
        ROOT / "configs/moe/quickstart.yaml",
        [
            f"model.path={model}",
            "cluster.device=cuda",
            "numerics.dtype=bfloat16",
            "trainer.expert=1",
            "trainer.megatron={mtp_num_layers: 1}",
            f"rollout.engines=[{{name: actor, sglang: {json.dumps(sglang)}}}]",
            *changes,
        ],
    )


def planned(config: Config, model: Path) -> set[str]:
    """Names of the tensors that a publication brings an engine of one GPU."""
    spec = read_model(model, mtp_layers=config.trainer.megatron.get("mtp_num_layers") or 0)
    (buckets,) = publication_plan(config, spec, Sizes(), "cuda").plan.buckets
    return {tensor.name for bucket in buckets for tensor in bucket.tensors}


def test_the_plan_sends_the_layer_only_to_engines_that_draft_by_it(model: Path) -> None:
    plain = planned(configured(model), model)
    assert planned(configured(model, **EAGLE), model) - plain == {row.name for row in deepseek_v3.draft_rows(HF)}
    assert planned(configured(model, "trainer.megatron.mtp_num_layers=0", **EAGLE), model) == plain
    separate_draft = {**EAGLE, "speculative_draft_model_path": "/somewhere"}
    assert planned(configured(model, **separate_draft), model) == plain


def test_a_trained_layer_that_cannot_reach_the_draft_is_refused(model: Path, tmp_path: Path) -> None:
    with refused("publish.draft", about="rollout.engines.sglang.speculative_algorithm"):
        planned(configured(model, "publish.encoding=hf", **EAGLE), model)
    (tmp_path / "config.json").write_text(json.dumps({**HF, "num_nextn_predict_layers": 2}))
    with refused("publish.draft", about="rollout.engines.sglang.speculative_algorithm"):
        planned(configured(tmp_path, **EAGLE), tmp_path)


def test_a_flag_states_whether_the_draft_is_published() -> None:
    argv = server_argv(EngineSpec("one", "/model", "bfloat16", "cuda", 1, draft=True))
    assert publishes_draft(argv) and not publishes_draft(
        server_argv(EngineSpec("one", "/model", "bfloat16", "cuda", 1))
    )
    assert not publishes_draft(["launch", "--", "--publish-draft"])


@pytest.mark.parametrize("count", [0, 2])
def test_a_server_without_one_draft_does_not_start(count: int) -> None:
    class Scheduler:
        class draft_worker:
            weight_update_runners = staticmethod(lambda: [("draft", None)] * count)

    with refused("plugin.drafts"):
        take_draft(None, Scheduler())


def test_parameters_shared_with_the_draft_belong_to_the_target() -> None:
    target, draft = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    draft.weight = target.weight
    both = WithDraft(target, draft)
    assert {name for name, _ in both.named_parameters()} == {"weight", "bias", "draft.bias"}
