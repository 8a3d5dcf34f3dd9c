"""The FLOPs of a sequence are those that torch counts when transformers computes it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from slimx.extras.families import deepseek_v3, glm4_moe, minimax_m2, qwen2
from slimx.extras.recurrent.families import nemotron_h, qwen3_next
from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK
from slimx.extras.recurrent.numerics.state_space import state_space_rule
from slimx.extras.recurrent.state_space import StateSpace
from slimx.models.families import qwen3_moe
from slimx.models.flops import sequence_flops

COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_experts_per_tok": 3,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
QWEN = (Qwen3MoeConfig, Qwen3MoeForCausalLM, qwen3_moe, {"num_key_value_heads": 2, "head_dim": 24, "num_experts": 4})
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 8}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MODELS = {
    "GQA": QWEN,
    "dense": (Qwen2Config, Qwen2ForCausalLM, qwen2, {"num_key_value_heads": 2}),
    "GQA, shared experts": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        glm4_moe,
        {**EXPERTS, "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True, "use_qk_norm": True},
    ),
    "GQA, norms of projections": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        minimax_m2,
        {"num_key_value_heads": 2, "head_dim": 24, "num_local_experts": 4},
    ),
    "MLA": (DeepseekV3Config, DeepseekV3ForCausalLM, deepseek_v3, {**LATENT, **EXPERTS, "q_lora_rank": 24}),
    "MLA, whole queries": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        deepseek_v3,
        {**LATENT, **EXPERTS, "q_lora_rank": None},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name):
    config_class, model_class, family, sizes = MODELS[name]
    config = config_class(**COMMON, **sizes)
    torch.manual_seed(0)
    model = model_class(config)

    def counted(tokens: int) -> int:
        """Counts forward and backward on one sequence."""
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(tokens)[None] % 160).logits.sum().backward()
        return counter.get_total_flops()

    fields = {**config.to_dict(), **sizes}  # transformers renames some
    flops = sequence_flops(family.transformer_config(fields), config.vocab_size, family.layer_kind(fields))
    for tokens in (16, 48):
        # The eager attention computes the masked half of the pairs too.
        assert counted(tokens) == pytest.approx(flops.linear * tokens + 2 * flops.quadratic * tokens**2, rel=1e-9)
    assert flops(48) == flops.linear * 48 + flops.quadratic * 48**2


def test_delta_nets_cost_as_much_for_every_token():
    """The forward pass is counted, since torch takes the gradient of a depthwise convolution for that of a full one;
    without triangular systems, which it does not count, and with the convolution's edge, which it does."""
    config = Qwen3NextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=4,
        shared_expert_intermediate_size=48,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=10,
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config)
    flops = sequence_flops(
        qwen3_next.transformer_config(config.to_dict()), config.vocab_size, qwen3_next.layer_kind(config.to_dict())
    )
    for tokens in (64, 192):  # whole chunks
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(tokens)[None] % 160, use_cache=False)
        expected = flops.linear * tokens + 2 * flops.quadratic * tokens**2
        assert 3 * counter.get_total_flops() == pytest.approx(expected, rel=5e-3)


def test_mamba_2_layers_cost_as_much_for_every_token():
    """The forward pass, like that of delta nets. transformers repeats B and C for every head, so here each head is a
    separate group, and takes the states of all chunks from one another at once, which is left out."""
    config = NemotronHConfig(
        **{name: value for name, value in COMMON.items() if name != "num_hidden_layers"},
        num_key_value_heads=2,
        head_dim=24,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=48,
        hybrid_override_pattern="M*-E",
        mamba_num_heads=4,
        mamba_head_dim=12,
        n_groups=4,
        ssm_state_size=10,
        chunk_size=128,  # of mamba_ssm's kernels as megatron-core calls them
    )
    torch.manual_seed(0)
    model = NemotronHForCausalLM(config)
    flops = sequence_flops(
        nemotron_h.transformer_config(config.to_dict()), config.vocab_size, nemotron_h.layer_kind(config.to_dict())
    )
    for chunks in (1, 3):
        tokens = 128 * chunks
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(tokens)[None] % 160, use_cache=False)
        between = 2 * (chunks + 1) ** 2 * 4 * 12 * 10
        expected = flops.linear * tokens + 2 * flops.quadratic * tokens**2
        assert 3 * (counter.get_total_flops() - between) == pytest.approx(expected, rel=5e-3)


def test_heads_of_a_mamba_2_layer_share_the_scores_of_their_group():
    sizes, tokens = StateSpace(hidden=64, heads=8, head=12, groups=4, state=10), 2 * CHUNK
    x, step, keys = torch.zeros(tokens, 8, 12), torch.zeros(tokens, 8), torch.zeros(tokens, 4, 10)
    with FlopCounterMode(display=False) as counter:
        state_space_rule(x, step, torch.zeros(8), keys, keys, torch.zeros(8), [tokens])
    assert counter.get_total_flops() == 2 * sizes.rule(CHUNK) * tokens
