"""A tiny model of transformers with experts behind dense layers and a layer of multi-token prediction."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from slimx.data.records import Trajectory
from tests.integration import family_oracle
from tests.integration.conftest import Weights
from tests.integration.family_oracle import persistent, scatter, stock_model

WRONG = (5, 3)
"""Sequence and position at which the last layer's route is not the model's."""


def split_experts(tensors: dict[str, torch.Tensor]) -> Weights:
    """Returns tensors by checkpoint names: transformers holds a layer's experts in one tensor."""
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


class RoutedOracle(family_oracle.Oracle):
    """A model with experts behind dense layers; `routers` are those of its layers."""

    routers: list[torch.nn.Module]

    def trajectories(self) -> list[Trajectory]:
        """Returns trajectories with the model's routes, one of them wrong."""
        trajectories = super().trajectories()
        for number, trajectory in enumerate(trajectories):
            trajectory.routed_experts = self.routes(trajectory.token_ids[:-1])
            if number == WRONG[0]:
                chosen = trajectory.routed_experts[WRONG[1], -1]
                chosen[0] = next(expert for expert in range(8) if expert not in chosen)
        return trajectories

    def routes(self, tokens: np.ndarray) -> np.ndarray:
        """Returns uint8 [L, layers, k] as an engine reports them: zeros for dense layers."""
        found: list[torch.Tensor] = []
        hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in self.routers]
        with torch.no_grad():
            self.logits(tokens)
        for hook in hooks:
            hook.remove()
        dense = [torch.zeros_like(found[0])] * (self.model.config.num_hidden_layers - len(self.routers))
        return torch.stack(dense + found, 1).numpy().astype(np.uint8)


class Oracle(RoutedOracle):
    """A model with DeepSeek-V3's experts, its prediction layer, and the checkpoint of both."""

    def __init__(self, path: Path, seed: int, config: str, fields: dict[str, Any]):
        """`config`: name of its configuration's class in transformers."""
        from transformers.modeling_layers import MtpLayer

        super().__init__(path, stock_model(path, seed, config, fields))
        layers = self.model.model.layers
        deeper = copy.deepcopy(self.model.config)
        # Of some models: the prediction layer has the last layer's MLP and an indexer.
        for key, kind in (("mlp_layer_types", None), ("indexer_types", "full")):
            if kinds := getattr(deeper, key, None):
                setattr(deeper, key, [*kinds, kind or kinds[-1]])
        self.mtp = MtpLayer(deeper, type(layers[-1]), type(self.model.model.norm), len(layers))
        # Layers of some models return the tokens that they saw in addition to their states.
        self.mtp.mtp_block.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
        scatter(self.mtp)
        self.routers = [layer.mlp.gate for layer in layers if hasattr(layer.mlp, "gate")]
        if fields.get("num_mtp_layers") or fields.get("num_nextn_predict_layers"):
            self.weights |= self.renamed({**dict(self.mtp.named_parameters()), **persistent(self.mtp)})
            save_file(self.weights, path / "model.safetensors", metadata={"format": "pt"})

    def renamed(self, tensors: dict[str, torch.Tensor]) -> Weights:
        """Returns the prediction layer's tensors as checkpoints name them."""
        prefix = f"model.layers.{self.model.config.num_hidden_layers}."
        names = {name: name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm") for name in tensors}
        return split_experts({prefix + names[name]: tensor for name, tensor in tensors.items()})

    def predicted(self, tokens: np.ndarray) -> torch.Tensor:
        """Returns logits [L - 1, vocab] of the prediction layer, with gradient for its own weights only."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with torch.no_grad():
            hidden = self.model.model(ids).last_hidden_state[:, :-1]
            embedded = self.model.model.embed_tokens(ids[:, 1:])
            positions = torch.arange(embedded.shape[1])[None]
            rotary = self.model.model.rotary_emb(embedded, position_ids=positions)
        mask = torch.full((embedded.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        states = self.mtp(embedded, hidden, rotary, mask, positions, None)
        return states[0] @ self.model.lm_head.weight.detach().T
