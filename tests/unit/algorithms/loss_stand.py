"""Objectives written as loops over sequences, on batches of a few tokens, and the proof that slimx agrees with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass

import pytest
import torch

from slimx.algorithms.inputs import LossInputs
from slimx.algorithms.losses.objective import make_loss
from slimx.config.sections.algorithm import Algorithm
from slimx.trainer.context import ContextShard

Number = torch.Tensor
COLUMNS = {
    "old": "old_logprobs",
    "rollout": "rollout_logprobs",
    "reference": "reference_logprobs",
    "teacher": "teacher_logprobs",
    "a": "advantages",
    "w": "weight",
    "lp": "logprobs",
    "entropy": "entropy",
    "selected": "selected",
}
"""Values of a token by their names in formulas, and in inputs."""


@dataclass
class Sequences:
    """A batch of sequences, float64; `values[name][i]` is [n_i]."""

    values: dict[str, list[torch.Tensor]]

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.values["logprobs"]]

    def take(self, numbers: Sequence[int]) -> Sequences:
        return Sequences({name: [tensors[i] for i in numbers] for name, tensors in self.values.items()})


def batch(seed: int, *, shared_advantages: bool = False) -> Sequences:
    """Returns five sequences of 1 to 9 tokens; ratios and gaps on both sides of every bound; a third of the tokens
    untrained, where garbage stands."""
    g = torch.Generator().manual_seed(seed)
    values: dict[str, list[torch.Tensor]] = {name: [] for name in COLUMNS.values()}
    for n in (9, 4, 1, 7, 6):
        draw = lambda scale: scale * torch.randn(n, generator=g, dtype=torch.float64)  # noqa: B023, E731
        old, trained = -3 * torch.rand(n, generator=g, dtype=torch.float64), torch.rand(n, generator=g) > 0.3
        trained[-1] = True
        advantages = draw(1.0) if not shared_advantages else draw(1.0)[:1].repeat(n)
        untrained = torch.where(torch.rand(n, generator=g) > 0.5, 800.0, -800.0).double()
        values["logprobs"].append(old + draw(0.5))
        values["weight"].append(trained * (0.02 + 0.1 * torch.rand(n, generator=g, dtype=torch.float64)))
        values["advantages"].append(advantages)
        values["old_logprobs"].append(torch.where(trained, old, untrained))
        values["rollout_logprobs"].append(torch.where(trained, old + draw(0.6), -untrained))
        values["reference_logprobs"].append(torch.where(trained, old + draw(0.4), untrained))
        values["teacher_logprobs"].append(torch.where(trained, old + draw(0.4), untrained))
        values["entropy"].append(torch.rand(n, generator=g, dtype=torch.float64))
        values["selected"].append(((torch.rand(n, generator=g) > 0.7) & trained).double())
    return Sequences(values)


def loss_inputs(**fields: torch.Tensor) -> LossInputs:
    """Returns inputs whose old log-probs are the engine's unless `rollout_logprobs` differ."""
    return LossInputs(**{"rollout_logprobs": fields["old_logprobs"]} | fields)


def packed(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor, LossInputs]:
    """Returns all sequences one after another: log-probs and entropy with gradient, and the inputs made of them."""
    whole = {name: torch.cat(tensors) for name, tensors in sequences.values.items()}
    lp, entropy = whole["logprobs"].requires_grad_(), whole["entropy"].requires_grad_()
    shard = ContextShard(1, 0, None)
    inputs = LossInputs(**whole, sequence_sum=lambda values: shard.sequence_sum(values, sequences.lengths))
    return lp, entropy, inputs


Token = make_dataclass("Token", COLUMNS)


Formula = Callable[[list[Token]], list[Number]]
"""Objective of each trained token of one sequence."""


def ratio(t: Token) -> Number:
    return torch.exp(t.lp) / torch.exp(t.old)


def minimum(r: Number, a: Number, low: float, high: float) -> Number:
    return torch.min(r * a, torch.clamp(r, 1 - low, 1 + high) * a)


def tokens_of(sequences: Sequences, lp: torch.Tensor, entropy: torch.Tensor) -> list[list[Token]]:
    """Returns the trained tokens of each sequence."""
    values = sequences.values | {
        "logprobs": lp.split(sequences.lengths),
        "entropy": entropy.split(sequences.lengths),
        "selected": [marks.bool().tolist() for marks in sequences.values["selected"]],
    }
    out = []
    for i, weights in enumerate(values["weight"]):
        columns = [values[name][i] for name in COLUMNS.values()]
        out.append([Token(*(column[k] for column in columns)) for k in range(len(weights)) if weights[k] > 0])
    return out


def agree(algorithm: Algorithm, sequences: Sequences, formula: Callable[[list[list[Token]]], Number]) -> None:
    """Asserts that loss and gradients of the configured loss are those of `formula`."""
    lp, entropy, inputs = packed(sequences)
    loss, _ = make_loss(algorithm)(inputs)
    expected = formula(tokens_of(sequences, lp, entropy))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    for leaf in (lp, entropy):
        (found,) = torch.autograd.grad(loss, leaf, allow_unused=True, retain_graph=True)
        (exact,) = torch.autograd.grad(expected, leaf, allow_unused=True, retain_graph=True)
        zero = torch.zeros_like(leaf)
        assert torch.allclose(zero if found is None else found, zero if exact is None else exact, rtol=0, atol=1e-11)


def clip(tokens: list[Token]) -> list[Number]:
    return [minimum(ratio(t), t.a, 0.2, 0.28) for t in tokens]


def gap_of(tokens: list[Token], level: str) -> list[float]:
    ratios = [math.exp(t.old.item()) / math.exp(t.rollout.item()) for t in tokens]
    if level == "token":
        return ratios
    return [math.prod(ratios) ** (1 if level == "sequence" else 1 / len(ratios))] * len(ratios)


def three_tokens() -> LossInputs:
    """Returns one sequence with w = 0.25, 1, 4 and ratios of 1."""
    old = torch.tensor([0.25, 0.3, 0.4], dtype=torch.float64).log()
    return LossInputs(
        logprobs=old.clone().requires_grad_(),
        weight=torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64),
        old_logprobs=old,
        rollout_logprobs=torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64).log(),
    )
