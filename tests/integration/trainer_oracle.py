"""A tiny Qwen3-MoE for trainers, and what transformers computes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from slimx.data.loss_weights import loss_weights
from slimx.data.records import Group, Prompt, Span, Trajectory
from tests.integration.conftest import Weights

TEMPERATURE = 0.7
VERSION = 3
"""The engines' weight version at the step that trains on the rollouts."""
CORRUPTED = 17
"""Positions of the saved rollouts whose experts are not those that the trainer chooses."""


def difference(found: Weights, expected: Weights) -> tuple[float, str]:
    """Returns the largest max|a - b| / max|b| over tensors, and the name of its tensor."""
    assert found.keys() == expected.keys()
    errors = {n: ((found[n] - b).abs().max() / b.abs().max()).item() for n, b in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def write_model(directory: Path, template: Path, weights: Weights) -> Path:
    shutil.copytree(template, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Oracle:
    """The same model in transformers."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def logprobs(self, batch: list[np.ndarray], temperature: float = 1.0) -> list[torch.Tensor]:
        """Returns [L - 1] per sequence, with gradient. Padding comes last, where causal attention does not see it."""
        ids = torch.ones(len(batch), max(map(len, batch)), dtype=torch.int64)
        for row, tokens in zip(ids, batch, strict=True):
            row[: len(tokens)] = torch.from_numpy(tokens)
        logits = self.model(ids).logits[:, :-1] / temperature
        values = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        return [row[: len(tokens) - 1] for row, tokens in zip(values, batch, strict=True)]

    def sft_loss(self, batch: list[Trajectory]) -> torch.Tensor:
        weights = loss_weights(batch, "token")
        logprobs = self.logprobs([trajectory.token_ids for trajectory in batch])
        return -sum((torch.from_numpy(w) * lp).sum() for w, lp in zip(weights, logprobs, strict=True))

    def experts(self, tokens: np.ndarray) -> np.ndarray:
        """Returns uint8 [L - 1, layers, 2]: the experts of every input position."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            routers = self.model(ids[None], output_router_logits=True).router_logits
        return np.stack([layer[:-1].topk(2).indices.numpy() for layer in routers], 1).astype(np.uint8)

    def named(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
        """Returns `of` every parameter by checkpoint name; transformers has a layer's experts in one tensor."""
        out = {}
        for name, parameter in self.model.named_parameters():
            prefix, _, kind = name.rpartition(".experts.")
            if not prefix:
                out[name] = of(parameter)
                continue
            for expert, tensor in enumerate(of(parameter)):
                parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
                for part, value in zip(parts, tensor.chunk(len(parts)), strict=True):
                    out[f"{prefix}.experts.{expert}.{part}.weight"] = value
        return out

    def gradients(self) -> Weights:
        return self.named(lambda parameter: parameter.grad)


def rollouts(policy: Oracle) -> list[Group]:
    """Makes 11 rollouts in groups of 3, 2, 4, 2; one in three with an inserted answer and a second turn; a few of an
    older version. Old log-probs lie so far from the policy's that ratios are clipped on both sides."""
    random = np.random.default_rng(7)
    groups, wrong = [], 0
    for number, size in enumerate((3, 2, 4, 2)):
        prompt = random.integers(1, 128, 4 + number)
        group = Group(id=f"g{number}", prompt=Prompt(id=f"p{number}", token_ids=prompt.tolist()), trajectories=[])
        for index in range(size):
            version = VERSION - 1 if (number, index) in ((0, 1), (2, 2)) else VERSION
            spans, at = [Span(start=0, stop=len(prompt), source="prompt")], len(prompt)
            for turn in range(2 if index % 3 == 2 else 1):
                if turn:
                    spans.append(Span(start=at, stop=at + 3, source="inserted", turn=1))
                    at += 3
                stop = at + int(random.integers(4, 14))
                spans.append(Span(start=at, stop=stop, source="sampled", turn=turn, version=version))
                at = stop
            tokens = np.concatenate([prompt, random.integers(1, 128, at - len(prompt))]).astype(np.int32)
            sampled = np.concatenate([[s.source == "sampled"] * (s.stop - s.start) for s in spans])
            with torch.no_grad():
                logprobs_here = np.concatenate([[np.nan], policy.logprobs([tokens], TEMPERATURE)[0].numpy()])
            noise = 0.3 * random.standard_normal(len(tokens))
            experts, corrupted = policy.experts(tokens), []
            # From the middle on and at one layer only, so that earlier positions and the other layer stay equal.
            for position in range(len(experts) // 2, len(experts), 3):
                if wrong < CORRUPTED:
                    chosen = experts[position, wrong % 2]
                    chosen[0] = next(e for e in range(8) if e not in chosen)
                    corrupted.append(position)
                    wrong += 1
            group.trajectories.append(
                Trajectory(
                    id=f"g{number}/{index}",
                    rollout_id=f"g{number}/{index}",
                    group_id=group.id,
                    index=index,
                    token_ids=tokens,
                    loss_mask=sampled.astype(np.uint8),
                    logprobs=np.where(sampled, logprobs_here + noise, np.nan).astype(np.float32),
                    spans=spans,
                    sampling={"temperature": TEMPERATURE},
                    routed_experts=experts,
                    reward=float(random.integers(0, 3)),
                    metadata={"corrupted": corrupted},
                )
            )
        groups.append(group)
    assert wrong == CORRUPTED
    return groups
