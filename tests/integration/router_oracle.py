"""Tiny models of transformers whose routers can be told what to choose, and the auxiliary terms in plain torch: the
other side of test_router."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slimx.data.loss_weights import loss_weights
from slimx.data.records import Trajectory
from tests.integration.conftest import Weights, perturbed
from tests.integration.deepseek_v3_oracle import MODELS, Oracle
from tests.integration.prediction_oracle import split_experts

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_models(directory: Path) -> dict[str, Path]:
    """Checkpoints of two families, and of the second one a later policy that routes otherwise."""
    torch.manual_seed(5)
    qwen, later = directory / "Qwen", directory / "Qwen later"
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = 0.2 * torch.randn_like(tensor)
            tensor.add_(noise) if "norm" in name else tensor.copy_(noise)
    for path in (qwen, later):
        model.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(QWEN))  # in the words of a published one
    weights = perturbed(load_file(qwen / "model.safetensors"), 2, 0.05)
    save_file(weights, later / "model.safetensors", metadata={"format": "pt"})
    return {"V3": Oracle(directory / "V3", 0, MODELS["V3"]).path, "Qwen": qwen, "Qwen later": later}


Microbatches = Sequence[Sequence[int]]
"""Numbers of the sequences in each."""


class Ran(NamedTuple):
    logprobs: torch.Tensor
    """Log-probabilities of the labels, [L - 1]."""
    logits: dict[int, torch.Tensor]
    """Logits of each layer's router, [L - 1, experts], with gradient."""
    routes: np.ndarray
    """[L - 1, layers, k]; zeros for dense layers."""


class Trained(NamedTuple):
    loss: float
    term: float
    """Its mean over MoE layers, without the coefficient."""
    gradients: Weights
    load: dict[int, np.ndarray]
    """Tokens of each expert by MoE layer."""


class RoutedModel:
    """One model run sequence by sequence; `logits` of its routers are kept with their gradient."""

    def __init__(self, path: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.config = self.model.config
        self.layers = [n for n, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "gate")]
        self.experts, self.topk = 8, self.config.num_experts_per_tok
        self.sigmoid = "deepseek" in self.config.model_type
        self._forced: np.ndarray | None = None
        self._logits: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}
        for number in self.layers:
            self._tell(number)

    def _tell(self, number: int) -> None:
        gate = self.model.model.layers[number].mlp.gate
        choose = gate.forward

        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, chosen = choose(hidden)
            if self._forced is not None:
                chosen = torch.from_numpy(self._forced[:, number].astype(np.int64))
                if self.sigmoid:
                    kept = logits.sigmoid().gather(1, chosen)
                    weights = self.config.routed_scaling_factor * kept / kept.sum(1, keepdim=True)
                else:
                    weights = logits.gather(1, chosen).softmax(1)
            self._logits[number], self._chosen[number] = logits, chosen
            return logits, weights, chosen

        gate.forward = forward

    def run(self, trajectory: Trajectory, forced: np.ndarray | None) -> Ran:
        """Its input positions with the routes `forced` [L - 1, layers, k], or its own."""
        tokens = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        self._forced, self._logits, self._chosen = forced, {}, {}
        logprobs = self.model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        routes = np.zeros((len(tokens) - 1, self.config.num_hidden_layers, self.topk), np.uint8)
        for number, experts in self._chosen.items():
            routes[:, number] = experts.numpy()
        return Ran(logprobs, self._logits, routes)

    def train(
        self,
        batch: Sequence[Trajectory],
        forced: Sequence[np.ndarray | None],
        term: str | None,
        coefficient: float,
        microbatches: Microbatches,
    ) -> Trained:
        """A step on mean cross entropy per token plus `coefficient` times the sum of the term over layers."""
        self.model.zero_grad()
        ran = [self.run(trajectory, routes) for trajectory, routes in zip(batch, forced, strict=True)]
        weights = loss_weights(batch, "token")
        loss = -sum((torch.from_numpy(w) * each.logprobs).sum() for w, each in zip(weights, ran, strict=True))
        extra = torch.zeros(())
        if term:
            extra = sum(TERMS[term]([each.logits[n] for each in ran], self, microbatches) for n in self.layers)
        (loss + coefficient * extra).backward()
        routes = np.concatenate([each.routes for each in ran])
        return Trained(
            loss.item(),
            extra.item() / len(self.layers),
            split_experts({name: parameter.grad for name, parameter in self.model.named_parameters()}),
            {n: np.bincount(routes[:, n].ravel(), minlength=self.experts) for n in self.layers},
        )


def _scores(logits: torch.Tensor, model: RoutedModel) -> torch.Tensor:
    return logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if model.sigmoid else logits.softmax(1)


def _share(scores: torch.Tensor, model: RoutedModel) -> torch.Tensor:
    """Each expert's share of the tokens' top k."""
    return torch.bincount(scores.topk(model.topk).indices.flatten(), minlength=model.experts) / (
        len(scores) * model.topk
    )


def z_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    return torch.cat(logits).logsumexp(1).square().mean()


def seq_aux_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    each = [_scores(part, model) for part in logits]
    return torch.stack([model.experts * (_share(s, model) * s.mean(0)).sum() for s in each]).mean()


def aux_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    packs = [_scores(torch.cat([logits[i] for i in pack]), model) for pack in microbatches]
    count = sum(map(len, packs))
    return sum(len(s) / count * model.experts * (_share(s, model) * s.mean(0)).sum() for s in packs)


def global_aux_loss(logits: list[torch.Tensor], model: RoutedModel, microbatches: Microbatches) -> torch.Tensor:
    packs = [_scores(torch.cat([logits[i] for i in pack]), model) for pack in microbatches]
    count = sum(map(len, packs))
    return sum(
        len(s) / count * model.experts * (_share(torch.cat(packs[: n + 1]), model) * s.mean(0)).sum()
        for n, s in enumerate(packs)
    )


TERMS = {term.__name__: term for term in (z_loss, seq_aux_loss, aux_loss, global_aux_loss)}
