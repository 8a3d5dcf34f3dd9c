"""Gradient of a configured loss with respect to a synthetic router: the gradient that flows through the gates of the
chosen experts, plus that of the load-balancing terms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slimx.algorithms.router_terms import LayerTally, Totals, normalized_scores
from slimx.config.schema import Config
from slimx.extras.doctor.effects.probe import Probe, policy_gradient
from slimx.models.families import ModelSpec

MICROBATCHES = 2
"""Number of micro-batches into which the synthetic rollouts are packed; `global_aux_loss` sums expert loads over
them."""


@dataclass(frozen=True, slots=True)
class RouterSizes:
    """Sizes of a model's routers and their score function, on which the load-balancing terms depend."""

    experts: int
    topk: int
    function: str
    """Score function of the router: softmax or sigmoid."""

    @classmethod
    def of(cls, spec: ModelSpec) -> RouterSizes:
        """Returns the router sizes of the model `spec`."""
        fields = spec.transformer
        function = fields.get("moe_router_score_function", "softmax")
        return cls(spec.experts, fields["moe_router_topk"], function)


@dataclass(slots=True)
class _Tokens:
    """Micro-batch without padding (see `slimx.algorithms.router_terms.CountedTokens`)."""

    counted: torch.Tensor
    segments: torch.Tensor
    sequences: int


def router_gradient(config: Config, probe: Probe, sizes: RouterSizes) -> np.ndarray:
    """Returns the gradient with respect to a router's logits at the positions that predict the N tokens of the
    synthetic batch, float64 [N x experts].

    The log-prob of a token depends on the gates of its experts, each with a random weight, so that the configured loss
    also has a gradient with respect to the router's logits."""
    random = torch.Generator().manual_seed(0)
    lengths = [len(values) for values in probe.begin]
    count = sum(lengths)
    logits = torch.randn(count, sizes.experts, generator=random, dtype=torch.float64)
    logits.requires_grad_()
    expert_weights = torch.randn(count, sizes.experts, generator=random, dtype=torch.float64)
    scores = normalized_scores(logits, sizes.function)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(sizes.topk).indices, True)
    gates = scores * taken
    gates = gates / gates.sum(1, keepdim=True)
    slope = torch.from_numpy(policy_gradient(config, probe)[:count])
    loss = (slope * (gates * expert_weights).sum(1)).sum()
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
        terms = tally.terms(logits[start:stop], taken[start:stop], tokens)
        if terms is not None:
            loss = loss + terms
        start = stop
    return torch.autograd.grad(loss, logits)[0].flatten().numpy()


def _alone(counts: torch.Tensor) -> None:
    """Does nothing. It replaces the sum over ranks, because there is only one rank here."""
