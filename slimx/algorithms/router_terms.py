"""The auxiliary terms of a router, and how evenly it loads its experts: formulas over tensors.

E experts, k of them for each token, T tokens; logits and scores are [T, E] in float32 or wider, padding is never
counted. A rank computes the share of its own tokens; the shares of all ranks and micro-batches sum to the term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from slimx.config.sections.trainer import Moe

SumRanks = Callable[[torch.Tensor], None]
"""Sums a tensor over ranks, in place."""


class CountedTokens(Protocol):
    """The t tokens of a micro-batch that are here."""

    counted: torch.Tensor
    """bool [t]: no padding."""
    segments: torch.Tensor
    """int64 [t]: number of the packed sequence that each token belongs to."""
    sequences: int
    """Packed sequences of the micro-batch, on all ranks together."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Denominators of an update: over all its micro-batches and data-parallel ranks, without padding."""

    tokens: float
    sequences: float


def normalised_scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    """A token's affinity to each expert, summing to 1: softmax, or sigmoid over its sum (DeepSeek-V3, eq. 19)."""
    if function == "softmax":
        return _wide(logits).softmax(-1)
    scores = _wide(logits).sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def z_loss(logits: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Sum of logsumexp(logits)^2 over tokens (ST-MoE, 2202.08906, eq. 5, before its mean)."""
    return (_wide(logits).logsumexp(-1).square() * counted).sum()


def top_counts(
    scores: torch.Tensor, topk: int, counted: torch.Tensor, segments: torch.Tensor, count: int
) -> torch.Tensor:
    """Count each segment's tokens that have an expert among their k highest scores: float32 [count, E]."""
    highest = torch.zeros_like(scores).scatter(1, scores.topk(topk).indices, 1.0) * counted[:, None]
    return scores.new_zeros(count, scores.shape[1]).index_add(0, segments, highest)


def balance_loss(
    scores: torch.Tensor,
    counted: torch.Tensor,
    segments: torch.Tensor,
    load: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """E * sum over tokens x of weight[segment of x] * sum over experts i of load[segment of x, i] * scores[x, i].

    `load` [segments, E] is each expert's share of its segment's choices and sums to 1. With weight 1 / T this is the
    load-balancing loss of Switch Transformers (2101.03961, eq. 4) and DeepSeek-V3 (2412.19437, eq. 17): 1 where load
    or scores are even."""
    sums = scores.new_zeros(load.shape).index_add(0, segments, scores * counted[:, None])
    return scores.shape[1] * (weight[:, None] * load * sums).sum()


def updated_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """Selection biases [..., E] after an update whose tokens chose each expert `load` [..., E] times: overloaded
    experts lose `rate`, underloaded ones gain it (DeepSeek-V3, section 2.1.2; 2408.15664, algorithm 1)."""
    return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)


class LayerTally:
    """Adds up one router's counts and terms over the micro-batches of an update.

    The loss that it returns, summed over micro-batches and ranks, is

        z_loss_coef * (mean over tokens of logsumexp(logits)^2)  +  aux_loss_coef * balance

    seq_aux_loss: balance is the mean over sequences of balance_loss, with the sequence's load. aux_loss: the mean over
    tokens of balance_loss's terms, with the load of the micro-batch that a token is in. global_aux_loss: the same with
    the load of all micro-batches up to that one, on all data-parallel ranks. Sequence and token means do not depend on
    packing and layout; load by micro-batch depends on packing, not on TP, CP, PP or EP. A load counts the experts with
    the k highest scores, without selection bias, groups or replay, as megatron-core and DeepSeek-V3 define it.
    """

    def __init__(
        self,
        settings: Moe,
        totals: Totals | None,
        *,
        topk: int,
        function: str,
        sums: torch.Tensor,
        share: SumRanks,
        all_data: SumRanks,
    ):
        """`sums`: float64 [E + 2], zeros, where choices per expert, balance and squared logsumexp are added up.
        `share`: over the ranks that share a micro-batch (TP x CP); `all_data`: over these of all data-parallel ranks.
        `totals`: None if no term is on."""
        self.settings, self.totals, self.topk, self.function = settings, totals, topk, function
        self.sums, self._share, self._all_data = sums, share, all_data
        self._seen: torch.Tensor | None = None

    def terms(self, logits: torch.Tensor, routing_map: torch.Tensor, tokens: CountedTokens) -> torch.Tensor | None:
        """Count a micro-batch; the share of its tokens here in the auxiliary loss."""
        self.sums[:-2] += (routing_map & tokens.counted[:, None]).sum(0)
        if self.totals is None:
            return None
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.settings.aux_loss_coef:
            balance = self._balance(logits, tokens)
            self.sums[-2] += balance.detach()
            loss = loss + self.settings.aux_loss_coef * balance
        if self.settings.z_loss_coef:
            squares = z_loss(logits, tokens.counted) / self.totals.tokens
            self.sums[-1] += squares.detach()
            loss = loss + self.settings.z_loss_coef * squares
        return loss

    def _balance(self, logits: torch.Tensor, tokens: CountedTokens) -> torch.Tensor:
        scores, kind = normalised_scores(logits, self.function), self.settings.aux_loss_type
        single = kind != "seq_aux_loss"
        segments = torch.zeros_like(tokens.segments) if single else tokens.segments
        count = 1 if single else tokens.sequences
        counts = top_counts(scores.detach(), self.topk, tokens.counted, segments, count)
        (self._all_data if kind == "global_aux_loss" else self._share)(counts)
        if kind == "global_aux_loss":
            counts = self._seen = counts if self._seen is None else self._seen + counts
        sizes = counts.sum(-1) / self.topk  # a segment of nothing but padding has none, and no tokens either
        load = counts / (self.topk * sizes.clamp(min=1))[:, None]
        if single:
            weight = torch.full_like(sizes, 1 / self.totals.tokens)
        else:
            weight = 1 / (sizes.clamp(min=1) * self.totals.sequences)
        return balance_loss(scores, tokens.counted, segments, load, weight)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32, or in what is wider already."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
