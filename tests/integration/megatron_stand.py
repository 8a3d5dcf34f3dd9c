"""A checkpoint of Megatron-LM made by hand, from Hugging Face tensors by plain torch.

Names and orders are written down once more, independently of the weight table and of megatron-core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.integration.conftest import Weights


class Hostile:
    """Unpickled, it would leave a file."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[Path, str]]:
        return Path.write_text, (self.witness, "code of the checkpoint has run")


def megatron_tensors(weights: Weights, config: dict[str, Any], *, per_layer: bool) -> Weights:
    """The whole model under the keys of Megatron-LM's torch_dist checkpoints, its vocabulary padded to 192 rows."""
    hidden, head, groups = config["hidden_size"], config["head_dim"], config["num_key_value_heads"]

    def fused(attention: str) -> torch.Tensor:
        q, k, v = (weights[f"{attention}.{part}_proj.weight"].view(groups, -1, head, hidden) for part in "qkv")
        return torch.cat([q, k, v], dim=1).reshape(-1, hidden)

    layers = []
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        experts = [f"{layer}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
        gated = [torch.cat([weights[f"{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in experts]
        layers.append(
            {
                "self_attention.linear_qkv.layer_norm_weight": weights[f"{layer}.input_layernorm.weight"],
                "self_attention.linear_qkv.weight": fused(f"{layer}.self_attn"),
                "self_attention.q_layernorm.weight": weights[f"{layer}.self_attn.q_norm.weight"],
                "self_attention.k_layernorm.weight": weights[f"{layer}.self_attn.k_norm.weight"],
                "self_attention.linear_proj.weight": weights[f"{layer}.self_attn.o_proj.weight"],
                "pre_mlp_layernorm.weight": weights[f"{layer}.post_attention_layernorm.weight"],
                "mlp.router.weight": weights[f"{layer}.mlp.gate.weight"],
                "mlp.experts.experts.linear_fc1.weight": torch.stack(gated),
                "mlp.experts.experts.linear_fc2.weight": torch.stack(
                    [weights[f"{expert}.down_proj.weight"] for expert in experts]
                ),
            }
        )
    out = {"decoder.final_layernorm.weight": weights["model.norm.weight"]}
    padding = torch.full((192 - config["vocab_size"], hidden), 7.0)
    for key, name in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        out[f"{key}.weight"] = torch.cat([weights[f"{name}.weight"], padding])
    for name in layers[0]:
        if per_layer:
            out |= {f"decoder.layers.{number}.{name}": layer[name] for number, layer in enumerate(layers)}
        else:
            out[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
    return out


def write_megatron(directory: Path, tensors: Weights, witness: Path) -> Path:
    """A release as slime's converter leaves it. Its arguments hold code, which must not run."""
    release = directory / "release"
    release.mkdir(parents=True)
    dcp.save(dict(tensors), checkpoint_id=release, no_dist=True)
    arguments = argparse.Namespace(num_layers=4, hook=Hostile(witness))
    torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": 0}, release / "common.pt")
    (release / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
        '"common_backend_version": 1}'
    )
    (directory / "latest_checkpointed_iteration.txt").write_text("release")
    return directory
