"""Auxiliary losses of an MoE router, and balancing of its experts' loads, as formulas over tensors.

E is the number of experts, k the number of experts per token, and T the number of tokens. Logits and scores are [T, E]
in float32 or wider, and padding is never counted. A rank computes the contribution of its local tokens; the
contributions of all ranks and micro-batches sum to the loss term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from slimx.config.sections.trainer import Moe

SumRanks = Callable[[torch.Tensor], object]
"""Function that sums a tensor over a group of ranks, in place."""


class CountedTokens(Protocol):
    """Description of the t tokens of a micro-batch that are on this rank."""

    counted: torch.Tensor
    """bool [t]: True at tokens that are not padding."""
    segments: torch.Tensor
    """int64 [t]: index of the packed sequence to which each token belongs."""
    sequences: int
    """Number of packed sequences in the micro-batch, on all ranks together."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Numbers of tokens and sequences in an update, by which sums are divided to obtain the update's means. They
    include all micro-batches and data-parallel ranks, but no padding."""

    tokens: float
    sequences: float


def normalized_scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    """Computes each token's affinities to experts, which sum to 1. `function`: "softmax" or "sigmoid"; sigmoid scores
    are divided by their sum (DeepSeek-V3, eq. 19)."""
    if function == "softmax":
        return _wide(logits).softmax(-1)
    scores = _wide(logits).sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def z_loss(logits: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Computes the sum over tokens of logsumexp(logits)^2 (ST-MoE, 2202.08906, eq. 5, without its mean). `counted`: see
    `CountedTokens`."""
    return (_wide(logits).logsumexp(-1).square() * counted).sum()


def top_counts(
    scores: torch.Tensor, topk: int, counted: torch.Tensor, segments: torch.Tensor, count: int
) -> torch.Tensor:
    """Counts, for each segment and expert, the tokens that have the expert among their `topk` highest scores: float32
    [count, E]. `counted` and `segments`: see `CountedTokens`; `count`: number of segments."""
    highest = torch.zeros_like(scores).scatter(1, scores.topk(topk).indices, 1.0) * counted[:, None]
    return scores.new_zeros(count, scores.shape[1]).index_add(0, segments, highest)


def balance_loss(
    scores: torch.Tensor,
    counted: torch.Tensor,
    segments: torch.Tensor,
    load: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Computes E * sum over tokens x of weight[segment of x] * sum over experts i of load[segment of x, i] * scores[x,
    i].

    `load` [segments, E] is the fraction of a segment's expert choices that each expert received, and sums to 1.
    `weight` [segments] weights the tokens of a segment. With weight 1 / T this is the load-balancing loss of Switch
    Transformers (2101.03961, eq. 4) and DeepSeek-V3 (2412.19437, eq. 17), which is 1 if load or scores are uniform."""
    sums = scores.new_zeros(load.shape).index_add(0, segments, scores * counted[:, None])
    return scores.shape[1] * (weight[:, None] * load * sums).sum()


def updated_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns the experts' selection biases [..., E] after an update in which tokens chose each expert `load` [..., E]
    times. The bias of overloaded experts decreases by `rate`, and that of underloaded experts increases by `rate`
    (DeepSeek-V3, section 2.1.2; 2408.15664, algorithm 1)."""
    return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)


class LayerTally:
    """Accumulator of one router's expert counts and auxiliary losses over the micro-batches of an update.

    The losses that `terms` returns, summed over micro-batches and ranks, are

        z_loss_coef * (mean over tokens of logsumexp(logits)^2)  +  aux_loss_coef * balance

    where balance depends on aux_loss_type:

    - seq_aux_loss: the mean over sequences of `balance_loss`, with the load of the sequence.
    - aux_loss: the mean over tokens of the terms of `balance_loss`, with the load of the token's micro-batch.
    - global_aux_loss: the same mean, with the load of all micro-batches up to this one, on all data-parallel ranks.

    Means over sequences and tokens do not depend on packing and parallel layout. The load of a micro-batch depends on
    packing, but not on TP, CP, PP or EP. A load counts the experts with the k highest scores, without selection bias,
    expert groups or replay, as megatron-core and DeepSeek-V3 define it.
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
        """Stores the parameters. `sums`: accumulator, float64 [E + 2], initially zeros, of the number of choices of
        each expert, the balance term and the squared logsumexp.

        `sum_over_shards`: sums over the ranks that share a micro-batch (TP x CP); `sum_over_data`: sums over the same
        ranks of all data-parallel replicas (TP x CP x DP). `topk`: number of experts per token; `function`: see
        `normalized_scores`. `totals`: None if no auxiliary loss is enabled."""
        self.settings = settings
        self.totals = totals
        self.topk = topk
        self.function = function
        self.sums = sums
        self._sum_over_shards = sum_over_shards
        self._sum_over_data = sum_over_data
        self._earlier: torch.Tensor | None = None
        """Expert counts of the update's earlier micro-batches, for global_aux_loss."""

    def terms(self, logits: torch.Tensor, routing_map: torch.Tensor, tokens: CountedTokens) -> torch.Tensor | None:
        """Adds a micro-batch to the sums. Returns the contribution of this rank's tokens to the auxiliary loss; None if
        no auxiliary loss is enabled. `routing_map` [t, E]: True at the experts that each token chose."""
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
        sizes = counts.sum(-1) / self.topk  # 0 for a segment of only padding, which has no tokens
        load = counts / (self.topk * sizes.clamp(min=1))[:, None]
        if by_sequence:
            weight = 1 / (sizes.clamp(min=1) * totals.sequences)
        else:
            weight = torch.full_like(sizes, 1 / totals.tokens)
        return balance_loss(scores, tokens.counted, segments, load, weight)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits in float32, or in their own dtype if it is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
