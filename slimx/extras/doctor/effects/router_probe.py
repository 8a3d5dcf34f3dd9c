"""The gradient of an invented router under a configuration: what the loss says through its gates, and its own terms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slimx.algorithms.router_terms import LayerTally, Totals, normalised_scores
from slimx.config.schema import Config
from slimx.extras.doctor.effects.probe import Probe, policy_gradient
from slimx.models.families import ModelSpec

MICROBATCHES = 2
"""Into which the probe's rollouts are packed: `global_aux_loss` adds up loads over them."""


@dataclass(frozen=True, slots=True)
class RouterSizes:
    """Sizes of a model's routers that the terms depend on."""

    experts: int
    topk: int
    function: str
    """Function of the scores: softmax or sigmoid."""

    @classmethod
    def of(cls, spec: ModelSpec) -> RouterSizes:
        fields = spec.transformer
        function = fields.get("moe_router_score_function", "softmax")
        return cls(spec.experts, fields["moe_router_topk"], function)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A micro-batch without padding (`slimx.algorithms.router_terms.CountedTokens`)."""

    counted: torch.Tensor
    segments: torch.Tensor
    sequences: int


def router_gradient(config: Config, probe: Probe, sizes: RouterSizes) -> np.ndarray:
    """Gradient with respect to the logits of a router before all N tokens of the probe, float64 [N x experts].

    The log-prob of a token moves with the gates of the experts that it takes, each of which is worth something random
    to it, so that the configured loss has a gradient here too."""
    random = torch.Generator().manual_seed(0)
    lengths = [len(values) for values in probe.begin]
    count = sum(lengths)
    logits, worth = (torch.randn(count, sizes.experts, generator=random, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    scores = normalised_scores(logits, sizes.function)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(sizes.topk).indices, True)
    gates = scores * taken
    gates = gates / gates.sum(1, keepdim=True)
    slope = torch.from_numpy(policy_gradient(config, probe)[:count])
    loss = (slope * (gates * worth).sum(1)).sum()
    tally = LayerTally(
        config.trainer.moe,
        Totals(count, len(lengths)),
        topk=sizes.topk,
        function=sizes.function,
        sums=torch.zeros(sizes.experts + 2, dtype=torch.float64),
        sum_over_shards=_alone,
        sum_over_data=_alone,
    )
    start = 0
    for part in np.array_split(lengths, MICROBATCHES):
        stop = start + int(part.sum())
        segments = torch.repeat_interleave(torch.arange(len(part)), torch.from_numpy(part))
        tokens = _Tokens(torch.ones(stop - start, dtype=torch.bool), segments, len(part))
        loss = loss + tally.terms(logits[start:stop], taken[start:stop], tokens)
        start = stop
    return torch.autograd.grad(loss, logits)[0].flatten().numpy()


def _alone(counts: torch.Tensor) -> None:
    """There are no other ranks to sum over."""
