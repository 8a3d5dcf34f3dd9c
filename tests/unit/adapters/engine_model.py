"""Stand-ins for SGLang's models on one rank: parameters of the engine layout, owned by modules that carry the sizes and
ranks that SGLang 0.5.23's layers carry."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from slimx.extras.families import bailing_moe_v2, deepseek_v3, glm4_moe, minimax_m2
from slimx.layout.engine import EngineLayout
from slimx.layout.parts import Part, matrix
from slimx.layout.ranks import EngineSizes
from slimx.models.families import Family, qwen3_moe
from tests.unit.layout.layout_stand import experts_of

Weights = dict[str, torch.Tensor]

QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 100,  # padded to 128
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "num_experts": 8,
    "moe_intermediate_size": 8,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
}
MINIMAX = QWEN3 | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "vocab_size": 120,  # padded to 128, of which 8 ranks hold some each
    "intermediate_size": 8,
    "num_local_experts": 8,
    "rotary_dim": 2,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
}
FAMILIES: dict[str, Family] = {
    family.ARCHITECTURE: family for family in (bailing_moe_v2, deepseek_v3, glm4_moe, minimax_m2, qwen3_moe)
}


class ServerModel(nn.Module):
    """One rank's model. `load_weights` slices as SGLang's does and derives `w_kc` from `kv_b_proj`."""

    def __init__(self, hf: dict[str, Any], sizes: EngineSizes, rank: int = 0, *, fused: bool = False) -> None:
        super().__init__()
        self.parts: dict[str, Part] = {}
        self.derivations = 0
        for part in engine_layout(hf, sizes, fused=fused).parts():
            if rank in part.ranks:
                self.parts[part.name] = part
                self._add(part.name, torch.randn(part.shape), hf, sizes, rank, fused)
        self.post_load_weights()

    def _add(self, name: str, values: torch.Tensor, hf: dict[str, Any], sizes: EngineSizes, rank: int, fused: bool):
        owner: nn.Module = self
        *path, leaf = name.split(".")
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner._modules[step]
        owner.register_parameter(leaf, nn.Parameter(values, requires_grad=False))
        parent = self.get_submodule(".".join(path[:-1]))
        if path[-1:] == ["gate"] and leaf != "weight":
            parent.correction_bias = values  # the same memory, as some of SGLang's models have it at hand
        for module, attributes in ((owner, owner_of(name, values, hf, sizes, rank, fused)), (parent, {})):
            if "q_lora_rank" in hf and path[-2:-1] == ["self_attn"]:
                parent.q_lora_rank = hf["q_lora_rank"]
            for key, value in attributes.items():
                setattr(module, key, value)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads as SGLang does where it matters here: drops latent projections that come without the other."""
        weights = dict(named)
        parameters = dict(self.named_parameters())
        for name, part in self.parts.items():
            latent = name.endswith("fused_qkv_a_proj_with_mqa.weight")
            if latent and not all(source in weights for source in part.sources):
                continue
            fill(parameters[name].data, part, weights)
        if any("kv_b_proj" in name for name in weights):
            self.post_load_weights()

    def post_load_weights(self) -> None:
        self.derivations += 1
        for name, module in list(self.named_modules()):
            if name.endswith("kv_b_proj"):
                self.get_submodule(name.rpartition(".")[0]).w_kc = module.weight.data * 2


def engine_layout(hf: dict[str, Any], sizes: EngineSizes, *, fused: bool = False) -> EngineLayout:
    family = FAMILIES[hf["architectures"][0]]
    return EngineLayout(family.engine_table(hf, fused_shared_experts=fused), sizes)


def checkpoint(layout: EngineLayout, seed: int = 0) -> Weights:
    """Returns random tensors of every name and shape that the layout's table reads."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in layout.table.entries():
        sources = [*entry.row.sources, *(source for group in entry.row.appended for source in group)]
        for expert in range(layout.table.experts if entry.row.stacked else 1):
            shapes |= {name.format(layer=entry.layer, expert=expert): shape for name, shape in sources}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def rank_local(layout: EngineLayout, weights: Weights, rank: int) -> Weights:
    """Returns `weights` as the parameters of one rank."""
    out: Weights = {}
    for part in layout.parts():
        if rank in part.ranks:
            fill(out.setdefault(part.name, torch.zeros(part.shape)), part, weights)
    return out


def fill(local: torch.Tensor, part: Part, weights: Weights) -> None:
    """Writes into a local tensor whatever of it `weights` bring."""
    for r in part.rects:
        if (source := weights.get(part.sources[r.source])) is not None:
            target = local.view(matrix(local.shape))[r.local_row :, r.local_col :][: r.rows, : r.cols]
            target.copy_(source.reshape(matrix(source.shape))[r.row :, r.col :][: r.rows, : r.cols])


def owner_of(
    name: str, local: torch.Tensor, hf: dict[str, Any], sizes: EngineSizes, rank: int, fused: bool
) -> dict[str, Any]:
    """Returns the sizes and ranks that SGLang's layer with the parameter `name` has."""
    attention = rank % sizes.attention_tensor
    group = SimpleNamespace(rank_in_group=rank)
    attention_group = SimpleNamespace(rank_in_group=attention)
    if re.fullmatch(r"(model\.embed_tokens|model\.word_embeddings|lm_head)\.weight", name):
        start = (rank if "lm_head" in name else attention) * local.shape[0]
        real = min(local.shape[0], max(hf["vocab_size"] - start, 0))
        indices = SimpleNamespace(org_vocab_start_index=start, num_org_elements=real, num_added_elements=0)
        return {"org_vocab_size": hf["vocab_size"], "shard_indices": indices}
    if "qkv_proj" in name or "query_key_value" in name:
        heads, groups, size = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
        shards = {"q_proj_shard_size": heads * size // sizes.attention_tensor}
        replicas = max(1, sizes.attention_tensor // groups)
        shard = groups * replicas * size // sizes.attention_tensor
        shards |= dict.fromkeys(("kv_proj_shard_size", "v_proj_shard_size"), shard)
        totals = {"total_num_heads": heads, "total_num_kv_heads": groups, "head_size": size, "v_head_size": size}
        groups_of = {"tp_group": attention_group, "kv_tp_group": attention_group, "num_kv_head_replicas": replicas}
        return shards | totals | groups_of
    if hf["architectures"] == MINIMAX["architectures"] and re.search(r"\.(q|k)_norm\.", name):
        heads = hf["num_attention_heads" if "q_norm" in name else "num_key_value_heads"]
        replicas = max(1, sizes.attention_tensor // heads)
        return {"attn_tp_size": sizes.attention_tensor, "attn_tp_rank": attention, "num_head_replicas": replicas}
    if "fused_qkv_a" in name:
        return {"output_size": local.shape[0]}
    if re.search(r"\.(q_b_proj|kv_b_proj)\.", name):
        return {"output_size": local.shape[0] * sizes.attention_tensor, "tp_group": attention_group}
    if ".o_proj." in name or ".dense." in name:
        return {"input_size": local.shape[1] * sizes.attention_tensor, "tp_group": attention_group}
    if "gate_up_proj" in name:
        half = local.shape[0] // 2
        return {"output_sizes": [half * sizes.tensor] * 2, "output_partition_sizes": [half] * 2, "tp_group": group}
    if ".down_proj." in name:
        return {"input_size": local.shape[1] * sizes.tensor, "tp_group": group}
    if ".experts." in name:
        return {
            "num_local_experts": local.shape[0],
            "num_fused_shared_experts": int(fused),
            "hidden_size": hf["hidden_size"],
            "intermediate_size_per_partition": hf["moe_intermediate_size"] // sizes.expert_tensor,
            "moe_ep_size": sizes.expert,
            "moe_ep_rank": rank // sizes.expert_tensor,
            "moe_tp_size": sizes.expert_tensor,
            "moe_tp_rank": rank % sizes.expert_tensor,
            "layer_id": int(name.split(".")[2]),
            "quant_method": SimpleNamespace(),
        }
    return {}


def expert_location(hf: dict[str, Any], sizes: EngineSizes) -> Any:
    """Returns SGLang's ExpertLocationMetadata as far as it is read."""
    experts = experts_of(hf)
    physical = torch.arange(experts + sizes.redundant) % experts
    return SimpleNamespace(
        physical_to_logical_map_cpu=physical.repeat(hf["num_hidden_layers"], 1), num_logical_experts=experts
    )
