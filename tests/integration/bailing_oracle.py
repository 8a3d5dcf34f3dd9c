"""Ling-2 in plain torch, after inclusionAI's published modelling: transformers does not know it. Its modules have the
names of the checkpoint's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.integration.conftest import Weights
from tests.integration.family_oracle import scatter
from tests.integration.prediction_oracle import RoutedOracle

Fields = dict[str, Any]
FIELDS: Fields = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "auto_map": {"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "embedding_dropout": 0.0,
    "attention_dropout": 0.0,
    "output_dropout": 0.0,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
TINY: Fields = FIELDS | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
}
CODE = """
from transformers import PretrainedConfig


class BailingMoeV2Config(PretrainedConfig):
    def __init__(self, rope_theta=600000.0, rope_scaling=None, **fields):
        # Out of these transformers 5 makes rope_parameters.
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        super().__init__(**fields)
"""
"""The module that `auto_map` names; published ones assign every field like that."""


class Attention(nn.Module):
    """Query heads share key and value heads; both are normed by head, and the first part of each rotates."""

    def __init__(self, hf: Fields):
        super().__init__()
        self.heads, self.groups, self.head = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
        rotating = int(self.head * hf["partial_rotary_factor"])
        self.frequencies = hf["rope_theta"] ** -(torch.arange(0, rotating, 2) / rotating)
        self.query_key_value = linear(hf["hidden_size"], (self.heads + 2 * self.groups) * self.head)
        self.query_layernorm, self.key_layernorm = (nn.RMSNorm(self.head, hf["rms_norm_eps"]) for _ in "qk")
        self.dense = linear(self.heads * self.head, hf["hidden_size"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [L, hidden] of one sequence."""
        every = self.query_key_value(hidden).unflatten(1, (-1, self.head)).transpose(0, 1)  # [heads, L, head]
        query, key, value = every.split([self.heads, self.groups, self.groups])
        query, key = self.rotated(self.query_layernorm(query)), self.rotated(self.key_layernorm(key))
        key, value = (x.repeat_interleave(self.heads // self.groups, 0) for x in (key, value))
        scores = query @ key.transpose(1, 2) / self.head**0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        return self.dense(out.transpose(0, 1).flatten(1))

    def rotated(self, states: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(states.shape[1])[:, None] * self.frequencies
        half = len(self.frequencies)
        x, y, rest = states.split([half, half, self.head - 2 * half], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([x * cos - y * sin, y * cos + x * sin, rest], -1)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Router(nn.Module):
    """Chooses groups by their best two experts, then experts of these, by score and bias; weighs by score."""

    def __init__(self, hf: Fields):
        super().__init__()
        self.hf = hf
        self.weight = nn.Parameter(torch.empty(hf["num_experts"], hf["hidden_size"]))
        self.register_buffer("expert_bias", torch.zeros(hf["num_experts"]))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ self.weight.T
        biased = (logits.sigmoid() + self.expert_bias).unflatten(1, (self.hf["n_group"], -1))
        best = biased.topk(2, -1).values.sum(-1).topk(self.hf["topk_group"], -1).indices
        closed = torch.ones(biased.shape[:2], dtype=torch.bool).scatter(1, best, False)
        open_ = biased.masked_fill(closed[..., None], -torch.inf).flatten(1)
        chosen = open_.topk(self.hf["num_experts_per_tok"], -1).indices
        weights = logits.sigmoid().gather(1, chosen)
        return logits, self.hf["routed_scaling_factor"] * weights / weights.sum(1, keepdim=True), chosen


class Experts(nn.Module):
    def __init__(self, hf: Fields):
        super().__init__()
        hidden, inner = hf["hidden_size"], hf["moe_intermediate_size"]
        self.gate = Router(hf)
        self.experts = nn.ModuleList(Mlp(hidden, inner) for _ in range(hf["num_experts"]))
        self.shared_experts = Mlp(hidden, inner * hf["num_shared_experts"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = self.gate(hidden)
        every = torch.stack([expert(hidden) for expert in self.experts], 1)  # [L, experts, hidden]
        routed = every.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[1]))
        return self.shared_experts(hidden) + (weights[..., None] * routed).sum(1)


class Layer(nn.Module):
    def __init__(self, hf: Fields, number: int):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(hf), norm(hf)
        self.attention = Attention(hf)
        dense = number < hf["first_k_dense_replace"]
        self.mlp = Mlp(hf["hidden_size"], hf["intermediate_size"]) if dense else Experts(hf)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Prediction(Layer):
    """A layer of multi-token prediction, numbered after the others."""

    def __init__(self, hf: Fields, number: int):
        super().__init__(hf, number)
        self.enorm, self.hnorm, self.final_layernorm = norm(hf), norm(hf), norm(hf)
        self.eh_proj = linear(2 * hf["hidden_size"], hf["hidden_size"])

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)
        return self.final_layernorm(super().forward(self.eh_proj(both)))


class Decoder(nn.Module):
    def __init__(self, hf: Fields):
        super().__init__()
        count = hf["num_hidden_layers"]
        self.word_embeddings = nn.Embedding(hf["vocab_size"], hf["hidden_size"])
        layers = [Layer(hf, number) for number in range(count)]
        layers += [Prediction(hf, count + more) for more in range(hf["num_nextn_predict_layers"])]
        self.layers, self.count, self.norm = nn.ModuleList(layers), count, norm(hf)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.word_embeddings(tokens)
        for layer in self.layers[: self.count]:
            hidden = layer(hidden)
        return self.norm(hidden)


class Ling(nn.Module):
    """A BailingMoeV2ForCausalLM: token ids [L] of one sequence -> logits [L, vocab]."""

    def __init__(self, hf: Fields):
        super().__init__()
        self.config = SimpleNamespace(**hf)
        self.model, self.lm_head = Decoder(hf), linear(hf["hidden_size"], hf["vocab_size"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def norm(hf: Fields) -> nn.RMSNorm:
    return nn.RMSNorm(hf["hidden_size"], hf["rms_norm_eps"])


def write(model: Ling, path: Path) -> Weights:
    """Writes the checkpoint of `model` as a published one looks; returns its tensors."""
    path.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(vars(model.config)))
    (path / "configuration_bailing_moe_v2.py").write_text(CODE)
    return weights


def load(path: Path) -> Ling:
    """Returns the model of the checkpoint in `path`."""
    model = Ling(json.loads((path / "config.json").read_text()))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model


class Oracle(RoutedOracle):
    """A tiny Ling-2 with its layer of multi-token prediction."""

    def __init__(self, path: Path, seed: int):
        torch.manual_seed(seed)
        model = Ling(TINY)
        scatter(model)
        write(model, path)
        super().__init__(path, model)
        *layers, self.mtp = self.model.model.layers
        self.routers = [layer.mlp.gate for layer in layers if isinstance(layer.mlp, Experts)]

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """Returns [L, vocab], with gradient."""
        return self.model(torch.from_numpy(tokens.astype(np.int64)))

    def renamed(self, tensors: dict[str, torch.Tensor]) -> Weights:
        """Returns the prediction layer's tensors as checkpoints name them."""
        return {f"model.layers.{TINY['num_hidden_layers']}.{name}": tensor for name, tensor in tensors.items()}

    def predicted(self, tokens: np.ndarray) -> torch.Tensor:
        """Returns logits [L - 1, vocab] of the prediction layer, with gradient for its own weights only."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            hidden, embedded = self.model.model(ids)[:-1], self.model.model.word_embeddings(ids[1:])
        return self.mtp(embedded, hidden) @ self.model.lm_head.weight.detach().T

    def _gradients(self) -> Weights:
        return {name: tensor.grad for name, tensor in self.model.named_parameters() if tensor.grad is not None}
