"""Log-probabilities of transformers for what an engine has sampled."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM

from tests.integration.conftest import Weights

PROMPT = [1, 20, 21, 15, 22, 23, 33, 2]


def logprobs_of(model: Qwen3MoeForCausalLM, weights: Weights, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """log softmax(logits / temperature) of ids[1:] in transformers, [L - 1]."""
    model.load_state_dict(fused(model, weights))
    with torch.no_grad():
        rows = (model(torch.tensor([ids])).logits[0, :-1].float() / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def fused(model: Qwen3MoeForCausalLM, weights: Weights) -> Weights:
    """`weights` under the names of transformers' modules: version 5 holds all experts of a layer in two tensors."""
    out = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            part = [[weights[f"{name[:-13]}.{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in range(len(tensor))]
            out[name] = torch.stack([torch.cat(pair) for pair in part])
        elif name.endswith(".experts.down_proj"):
            out[name] = torch.stack([weights[f"{name[:-10]}.{e}.down_proj.weight"] for e in range(len(tensor))])
        else:
            out[name] = weights[name]
    return out
