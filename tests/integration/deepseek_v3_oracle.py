"""Two tiny models of transformers' DeepSeek-V3: one with compressed queries, yarn, expert groups and a layer of
multi-token prediction (V3), one without any of them (Moonlight)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from slimx.data.records import Trajectory
from tests.integration import family_oracle
from tests.integration.conftest import Weights
from tests.integration.family_oracle import persistent, scatter

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 163840,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
MODELS = {
    "V3": {
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "rope_parameters": YARN,
        "num_mtp_layers": 1,
    },
    "Moonlight": {
        "q_lora_rank": None,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "num_mtp_layers": 0,
    },
}

WRONG = (5, 3)
"""Sequence and position at which the last layer's route is not the model's."""


def split_experts(tensors: dict[str, torch.Tensor]) -> Weights:
    """Checkpoint names: transformers holds a layer's experts in one tensor."""
    out = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition("experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            out[name] = tensor.detach().clone()
            continue
        parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        for expert, both in enumerate(tensor.detach()):
            for part, value in zip(parts, both.chunk(len(parts)), strict=True):
                out[f"{prefix}experts.{expert}.{part}.weight"] = value.clone()
    return out


class Oracle(family_oracle.Oracle):
    """A DeepSeek-V3, its prediction layer, and the checkpoint of both."""

    def __init__(self, path: Path, seed: int, fields: dict[str, Any]):
        super().__init__(path, seed, "DeepseekV3Config", SHAPE | fields)
        layers = self.model.config.num_hidden_layers
        self.mtp = MtpLayer(self.model.config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, layers)
        scatter(self.mtp)
        self.routers = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        if fields["num_mtp_layers"]:
            self.weights |= self.renamed({**dict(self.mtp.named_parameters()), **persistent(self.mtp)})
            save_file(self.weights, path / "model.safetensors", metadata={"format": "pt"})

    def trajectories(self) -> list[Trajectory]:
        """With the model's routes, one of them wrong."""
        trajectories = super().trajectories()
        for number, trajectory in enumerate(trajectories):
            trajectory.routed_experts = self.routes(trajectory.token_ids[:-1])
            if number == WRONG[0]:
                chosen = trajectory.routed_experts[WRONG[1], -1]
                chosen[0] = next(expert for expert in range(8) if expert not in chosen)
        return trajectories

    def renamed(self, tensors: dict[str, torch.Tensor]) -> Weights:
        """The prediction layer's tensors as DeepSeek names them."""
        prefix = f"model.layers.{self.model.config.num_hidden_layers}."
        names = {name: name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm") for name in tensors}
        return split_experts({prefix + names[name]: tensor for name, tensor in tensors.items()})

    def routes(self, tokens: np.ndarray) -> np.ndarray:
        """uint8 [L, layers, k] as an engine reports them: zeros for dense layers."""
        found: list[torch.Tensor] = []
        hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in self.routers]
        with torch.no_grad():
            self.logits(tokens)
        for hook in hooks:
            hook.remove()
        dense = [torch.zeros_like(found[0])] * self.model.config.first_k_dense_replace
        return torch.stack(dense + found, 1).numpy().astype(np.uint8)

    def predicted(self, tokens: np.ndarray) -> torch.Tensor:
        """Logits [L - 1, vocab] of the prediction layer, with gradient for its own weights only."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            hidden = self.model.model(ids).last_hidden_state[:, :-1]
            embedded = self.model.model.embed_tokens(ids[:, 1:])
            positions = torch.arange(embedded.shape[1])[None]
            rotary = self.model.model.rotary_emb(embedded, position_ids=positions)
        mask = torch.full((embedded.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        states = self.mtp(embedded, hidden, rotary, mask, positions, None)
        return states[0] @ self.model.lm_head.weight.detach().T
