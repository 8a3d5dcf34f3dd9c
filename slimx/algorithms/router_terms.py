"""The auxiliary terms of a router, and the balance of its experts' loads: formulas over tensors.

E experts, k of them per token, T tokens; logits and scores are [T, E] in float32 or wider, padding is never counted. A
rank computes the part of its tokens; the parts of all ranks and micro-batches sum to the term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from slimx.config.sections.trainer import Moe

SumRanks = Callable[[torch.Tensor], object]
"""Sums a tensor over ranks, in place."""


class CountedTokens(Protocol):
    """The t tokens of a micro-batch on this rank."""

    counted: torch.Tensor
    """bool [t]: not padding."""
    segments: torch.Tensor
    """int64 [t]: index of the packed sequence of each token."""
    sequences: int
    """Packed sequences of the micro-batch, on all ranks together."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Denominators of an update, over all its micro-batches and data-parallel ranks, without padding."""

    tokens: float
    sequences: float


def normalized_scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    """Computes tokens' affinities to experts, summing to 1: softmax, or sigmoid over its sum (DeepSeek-V3, eq. 19)."""
    if function == "softmax":
        return _wide(logits).softmax(-1)
    scores = _wide(logits).sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def z_loss(logits: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Sums logsumexp(logits)^2 over tokens (ST-MoE, 2202.08906, eq. 5, before its mean)."""
    return (_wide(logits).logsumexp(-1).square() * counted).sum()


def top_counts(
    scores: torch.Tensor, topk: int, counted: torch.Tensor, segments: torch.Tensor, count: int
) -> torch.Tensor:
    """Counts each segment's tokens that have an expert among their k highest scores: float32 [count, E]."""
    highest = torch.zeros_like(scores).scatter(1, scores.topk(topk).indices, 1.0) * counted[:, None]
    return scores.new_zeros(count, scores.shape[1]).index_add(0, segments, highest)


def balance_loss(
    scores: torch.Tensor,
    counted: torch.Tensor,
    segments: torch.Tensor,
    load: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Computes E * sum over tokens x of weight[segment of x] * sum over experts i of load[segment of x, i] *
    scores[x, i].

    `load` [segments, E] is each expert's fraction of its segment's choices and sums to 1. With weight 1 / T this is the
    load-balancing loss of Switch Transformers (2101.03961, eq. 4) and DeepSeek-V3 (2412.19437, eq. 17): 1 if load or
    scores are uniform."""
    sums = scores.new_zeros(load.shape).index_add(0, segments, scores * counted[:, None])
    return scores.shape[1] * (weight[:, None] * load * sums).sum()


def updated_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns selection biases [..., E] after an update whose tokens chose each expert `load` [..., E] times:
    overloaded experts lose `rate`, underloaded ones gain it (DeepSeek-V3, section 2.1.2; 2408.15664, algorithm 1)."""
    return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)


class LayerTally:
    """Sums of one router's counts and terms over the micro-batches of an update.

    The returned losses, summed over micro-batches and ranks, are

        z_loss_coef * (mean over tokens of logsumexp(logits)^2)  +  aux_loss_coef * balance

    seq_aux_loss: balance is the mean over sequences of balance_loss, with the sequence's load. aux_loss: the mean over
    tokens of balance_loss's terms, with the load of the token's micro-batch. global_aux_loss: the same with the load of
    all micro-batches up to that one, on all data-parallel ranks. Sequence and token means do not depend on packing and
    layout; load by micro-batch depends on packing, not on TP, CP, PP or EP. A load counts the experts with the k
    highest scores, without selection bias, groups or replay, as megatron-core and DeepSeek-V3 define it.
    """

    def __init__(
        self,
        settings: Moe,
        totals: Totals | None,
        *,
        topk: int,
        function: str,
        sums: torch.Tensor,
        sum_over_shards: SumRanks,
        sum_over_data: SumRanks,
    ):
        """Takes `sums`: float64 [E + 2], zeros, accumulators of choices per expert, balance and squared logsumexp.
        `sum_over_shards`: over the ranks that share a micro-batch (TP x CP); `sum_over_data`: over these of all
        data-parallel ranks. `totals`: None if no term is on."""
        self.settings = settings
        self.totals = totals
        self.topk = topk
        self.function = function
        self.sums = sums
        self._sum_over_shards = sum_over_shards
        self._sum_over_data = sum_over_data
        self._earlier: torch.Tensor | None = None
        """Counts of earlier micro-batches, for global_aux_loss."""

    def terms(self, logits: torch.Tensor, routing_map: torch.Tensor, tokens: CountedTokens) -> torch.Tensor | None:
        """Counts a micro-batch; returns the part of its local tokens in the auxiliary loss."""
        self.sums[:-2] += (routing_map & tokens.counted[:, None]).sum(0)
        if self.totals is None:
            return None
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.settings.aux_loss_coef:
            balance = self._balance(logits, tokens, self.totals)
            self.sums[-2] += balance.detach()
            loss = loss + self.settings.aux_loss_coef * balance
        if self.settings.z_loss_coef:
            squares = z_loss(logits, tokens.counted) / self.totals.tokens
            self.sums[-1] += squares.detach()
            loss = loss + self.settings.z_loss_coef * squares
        return loss

    def _balance(self, logits: torch.Tensor, tokens: CountedTokens, totals: Totals) -> torch.Tensor:
        scores = normalized_scores(logits, self.function)
        by_sequence = self.settings.aux_loss_type == "seq_aux_loss"
        if by_sequence:
            segments = tokens.segments
            count = tokens.sequences
        else:
            segments = torch.zeros_like(tokens.segments)
            count = 1
        counts = top_counts(scores.detach(), self.topk, tokens.counted, segments, count)
        if self.settings.aux_loss_type == "global_aux_loss":
            self._sum_over_data(counts)
            if self._earlier is not None:
                counts = self._earlier + counts
            self._earlier = counts
        else:
            self._sum_over_shards(counts)
        sizes = counts.sum(-1) / self.topk  # 0 for a segment of only padding, which has no tokens either
        load = counts / (self.topk * sizes.clamp(min=1))[:, None]
        if by_sequence:
            weight = 1 / (sizes.clamp(min=1) * totals.sequences)
        else:
            weight = torch.full_like(sizes, 1 / totals.tokens)
        return balance_loss(scores, tokens.counted, segments, load, weight)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits in float32, or their wider dtype."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
