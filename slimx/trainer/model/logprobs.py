"""Log-probs and entropy of labels from hidden states, chunk by chunk: no pass holds the logits of a whole sequence.

Logits of T tokens take 4 T V bytes in fp32: 32 GiB for 64k tokens and a vocabulary of 128k. Here the output layer is
applied to a chunk of tokens at a time, in the forward pass and again in the backward pass, which computes the logits of
a chunk, their gradient, and what they add to the gradients of the hidden states and of the weight, before it goes to
the next chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from slimx.data.support import Support
from slimx.numerics.mode import Head
from slimx.trainer.context import to_device

CHUNK_BYTES = 256 * 2**20
"""Bytes of the fp32 logits of one chunk on one rank, where the configuration leaves the size to slimx."""
SMALLEST_CHUNK = 128
"""Tokens below which a product with the output layer would mostly wait for its weight to be read."""
OUTSIDE = -1e30
"""Logit of a token outside the support: its probability is exactly 0, and 0 times it is 0 (which infinity is not)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Tokens whose log-probs are wanted, and the distribution that they are under."""

    labels: torch.Tensor
    """int64 [T]."""
    temperature: torch.Tensor | None = None
    """fp32 [T]: logits are divided by it, as the engine does before it samples; None: 1."""
    support: KeptTokens | None = None
    """Tokens that sampling kept; None: all of them, everywhere."""
    top: torch.Tensor | None = None
    """int64 [T, k]: tokens, k different ones at each position, whose log-probs are wanted, too; None: no others."""


class KeptTokens:
    """A `Support` on the device, cut by runs of positions."""

    def __init__(self, support: Support, device: torch.device):
        self._offsets = np.concatenate([[0], np.cumsum(support.counts, dtype=np.int64)])
        self._ids = to_device(support.ids.astype(np.int64), device)
        self._positions = to_device(support.positions(), device)
        self._restricted = to_device(support.counts > 0, device)

    def mask_(self, logits: torch.Tensor, first: int, vocabulary: range) -> None:
        """Give every logit outside the support the value `OUTSIDE`, in place.

        logits [C, V / TP] of positions first, first + 1, ... and of the token ids in `vocabulary`.
        """
        last = first + len(logits)
        start, stop = self._offsets[first], self._offsets[last]
        ids, rows = self._ids[start:stop], self._positions[start:stop] - first
        here = (ids >= vocabulary.start) & (ids < vocabulary.stop)
        rows, columns = rows[here], ids[here] - vocabulary.start
        kept = logits[rows, columns]
        logits.masked_fill_(self._restricted[first:last, None], OUTSIDE)
        logits[rows, columns] = kept


def chunk_tokens(configured: int | None, vocabulary: int) -> int:
    """Tokens of one chunk: as configured, or what makes `CHUNK_BYTES` of logits over `vocabulary` local token ids."""
    return configured or max(SMALLEST_CHUNK, CHUNK_BYTES // (4 * vocabulary))


def label_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: Targets,
    *,
    group: dist.ProcessGroup | None,
    chunk: int,
    head: Head | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-prob of every label and entropy of its distribution: softmax(hidden @ weight^T / temperature) over the
    support.

    hidden [T, h] and weight [V / TP, h] in the model's dtype; `group`: the tensor-parallel ranks, which hold equal
    shares of the vocabulary in order (None: one rank). Returns two fp32 tensors [T], both differentiable with respect
    to hidden and weight and equal on all ranks. The gradient of hidden is this rank's part of a sum over the group.
    `head`: the arithmetic of logits and log-probs (not of entropies); None: torch's.
    With `targets.top` two more: log-probs of these tokens [T, k], and of all others together [T], with a probability
    of `LEAST` at least.
    """
    if targets.top is None:
        return _LabelLogprobs.apply(hidden, weight, targets, group, chunk, head)[:2]
    return _LabelLogprobs.apply(hidden, weight, targets, group, chunk, head)


class _LabelLogprobs(torch.autograd.Function):
    """Forward: statistics of each chunk on each rank, then two collectives for all chunks together."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, group, chunk, arithmetic):
        head = _Head(weight, targets, group, chunk, arithmetic)
        count = len(hidden)
        top, total, weighted, label, whole, rest = (hidden.new_zeros(count, dtype=torch.float32) for _ in range(6))
        wanted = hidden.new_zeros((count, 0 if targets.top is None else targets.top.shape[1]), dtype=torch.float32)
        for part, logits in head.chunks(hidden):
            if arithmetic is not None:
                whole[part] = arithmetic.logprobs(logits, targets.labels[part], group)
            top[part] = logits.amax(1)
            label[part] = head.at_labels(logits, part)
            logits -= top[part, None]
            exp = logits.exp()
            total[part] = exp.sum(1)
            weighted[part] = torch.linalg.vecdot(exp, logits)
            if targets.top is not None:
                places = head.places(part)
                wanted[part].index_put_(places.slots, logits[places.columns])
                exp[places.columns] = 0.0
                rest[part] = exp.sum(1)
        if head.size > 1:
            own = top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            shift = own - top  # what moves this rank's sums from its own maximum to that of all
            weighted = shift.exp() * (weighted + shift * total)
            total = shift.exp() * total
            label = torch.where(head.held, label - top, 0.0)
            rest = shift.exp() * rest
            # What this rank does not hold is 0 and stays so.
            wanted = torch.where(head.holds_top(), wanted + shift[:, None], 0.0)
            sums = torch.cat([torch.stack([total, weighted, label, rest], 1), wanted], 1)
            dist.all_reduce(sums, group=group)
            (total, weighted, label, rest), wanted = sums[:, :4].unbind(1), sums[:, 4:]
        else:
            label = label - top
        logprobs = label - total.log() if arithmetic is None else whole
        entropy = total.log() - weighted / total
        tail = (rest / total).clamp_min(LEAST)
        ctx.save_for_backward(hidden, weight, top, total, entropy, tail)
        ctx.targets, ctx.group, ctx.chunk, ctx.arithmetic = targets, group, chunk, arithmetic
        ctx.set_materialize_grads(False)
        return logprobs, entropy, wanted - total.log()[:, None], tail.log()

    @staticmethod
    def backward(ctx, logprob_grad, entropy_grad, top_grad, tail_grad):
        hidden, weight, top, total, entropy, tail = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        with_top = top_grad is not None or tail_grad is not None
        if logprob_grad is None and entropy_grad is None and not with_top:
            return None, None, None, None, None, None
        head = _Head(weight, ctx.targets, ctx.group, ctx.chunk, ctx.arithmetic)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # fp32: a sum over chunks in bf16 would lose what a single product keeps.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for part, logits in head.chunks(hidden):
            logits -= top[part, None]
            probs = logits.exp().div_(total[part, None])
            if entropy_grad is not None:
                # d entropy / d x = -p (log p + entropy), with x the scaled logits.
                factor = logits.sub_((total[part].log() - entropy[part])[:, None]).mul_(-entropy_grad[part, None])
            else:
                factor = logits.zero_() if with_top else logits.new_zeros(len(logits), 1)
            if logprob_grad is not None:
                factor.sub_(logprob_grad[part, None])
            if with_top:
                head.add_top_(factor, part, top_grad, tail_grad, tail)
            grad = probs.mul_(factor)
            if logprob_grad is not None:
                head.add_at_labels_(grad, part, logprob_grad[part])
            if top_grad is not None:
                places = head.places(part)
                grad.index_put_(places.columns, top_grad[part][places.slots], accumulate=True)
            if ctx.targets.temperature is not None:
                grad.div_(ctx.targets.temperature[part, None])
            grad = grad.to(weight.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = grad @ weight
            if weight_grad is not None:
                weight_grad += grad.t() @ hidden[part]
        of_weight = None if weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, of_weight, None, None, None, None


LEAST = 1e-30
"""Probability of all tokens beside `Targets.top` together, where it is less: its inverse is finite in fp32."""


class _Places(NamedTuple):
    """Tokens of `Targets.top` that a rank holds, as pairs of indices."""

    slots: tuple[torch.Tensor, torch.Tensor]
    """In [C, k]."""
    columns: tuple[torch.Tensor, torch.Tensor]
    """In the logits [C, V / TP]."""


class _Head:
    """One rank's share of the output layer, over one pack of tokens."""

    def __init__(
        self,
        weight: torch.Tensor,
        targets: Targets,
        group: dist.ProcessGroup | None,
        chunk: int,
        arithmetic: Head | None,
    ):
        self.weight, self.targets, self.chunk = weight, targets, chunk
        self._product = torch.nn.functional.linear if arithmetic is None else arithmetic.product
        self.size = group.size() if group is not None else 1
        first = len(weight) * (group.rank() if group is not None else 0)
        self.vocabulary = range(first, first + len(weight))
        self.held = (targets.labels >= first) & (targets.labels < first + len(weight))
        """bool [T]: whether the label is in this rank's share."""
        self._columns = torch.where(self.held, targets.labels - first, 0)

    def chunks(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Runs of positions with their scaled fp32 logits [C, V / TP], which the caller may change."""
        for first in range(0, len(hidden), self.chunk):
            part = slice(first, min(first + self.chunk, len(hidden)))
            logits = self._product(hidden[part], self.weight).float()
            if self.targets.temperature is not None:
                logits /= self.targets.temperature[part, None]
            if self.targets.support is not None:
                self.targets.support.mask_(logits, first, self.vocabulary)
            yield part, logits

    def at_labels(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """[C]: each label's logit; where another rank holds it, something that is not used."""
        return logits.gather(1, self._columns[part, None])[:, 0]

    def places(self, part: slice) -> _Places:
        """The places that `targets.top` of the positions `part` have in this rank's share."""
        ids = self.targets.top[part] - self.vocabulary.start
        rows, slots = ((ids >= 0) & (ids < len(self.vocabulary))).nonzero(as_tuple=True)
        return _Places((rows, slots), (rows, ids[rows, slots]))

    def holds_top(self) -> torch.Tensor:
        """bool [T, k]: whether the token is in this rank's share; [T, 0] where none are wanted."""
        if self.targets.top is None:
            return self.held.new_zeros((len(self.held), 0))
        return (self.targets.top >= self.vocabulary.start) & (self.targets.top < self.vocabulary.stop)

    def add_top_(
        self,
        factor: torch.Tensor,
        part: slice,
        top_grad: torch.Tensor | None,
        tail_grad: torch.Tensor | None,
        tail: torch.Tensor,
    ) -> None:
        """Add to `factor` [C, V / TP], by which probabilities are multiplied, what the log-probs of `targets.top` and
        of the others together give: d log p_i / d x_j = [i = j] - p_j, without the first term; d log p_tail / d x_j =
        [j in tail] p_j / p_tail - p_j."""
        if top_grad is not None:
            factor.sub_(top_grad[part].sum(1, keepdim=True))
        if tail_grad is not None:
            places = self.places(part)
            kept = factor[places.columns] - tail_grad[part][places.columns[0]]
            factor.add_((tail_grad[part] * (1 / tail[part] - 1))[:, None])
            factor[places.columns] = kept

    def add_at_labels_(self, grad: torch.Tensor, part: slice, values: torch.Tensor) -> None:
        """Add to each label's column, on the rank that holds it."""
        grad.scatter_add_(1, self._columns[part, None], torch.where(self.held[part], values, 0.0)[:, None])
