"""Computes log-probs and entropies of labels from hidden states in chunks of tokens, so that the logits of all tokens
of a micro-batch never exist at the same time.

The logits of T tokens over a vocabulary of size V take 4 T V bytes in fp32: 32 GiB for 64k tokens and a vocabulary of
128k. Here the output layer is applied to one chunk of tokens at a time. The backward pass does so again: for each chunk
it recomputes the logits, and computes their gradient and the chunk's contribution to the gradients of hidden states and
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from slimx.data.sampling_support import Support
from slimx.numerics.mode import Head
from slimx.trainer.context import to_device

CHUNK_BYTES = 256 * 2**20
"""Default size of the fp32 logits of one chunk on one rank, in bytes."""
SMALLEST_CHUNK = 128
"""Default minimum number of tokens in a chunk. With fewer tokens, the matrix product with the output layer's weight
would be limited by the time to read this weight from memory."""
OUTSIDE = -1e30
"""Logit of a token outside the support. Its probability is exactly 0, and so is the product of logit and probability,
which would be NaN for an infinite logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Tokens whose log-probs are computed, and the distribution to which these log-probs refer. T is the number of
    tokens of a micro-batch."""

    labels: torch.Tensor
    """Label of each position: the next token, int64 [T]."""
    temperature: torch.Tensor | None = None
    """Sampling temperature by which the logits are divided, as in the engine, fp32 [T]; None means 1."""
    support: KeptTokens | None = None
    """Tokens that top-k or top-p sampling kept at each position; None if all tokens were kept at all positions."""
    top: torch.Tensor | None = None
    """Additional tokens whose log-probs are computed: k distinct ones at each position, int64 [T, k]; None for no
    additional tokens."""


class KeptTokens:
    """`Support` (the tokens that sampling kept at each position) on the device; masks the logits of one chunk of
    positions at a time."""

    def __init__(self, support: Support, device: torch.device):
        self._offsets = np.concatenate([[0], np.cumsum(support.counts, dtype=np.int64)])
        self._ids = to_device(support.ids.astype(np.int64), device)
        self._positions = to_device(support.positions(), device)
        self._restricted = to_device(support.counts > 0, device)

    def mask_(self, logits: torch.Tensor, first: int, vocabulary: range) -> None:
        """Sets the logits of tokens outside the support to `OUTSIDE`, in place. `logits` [C, V / TP]: the rows are C
        consecutive positions, beginning with `first`; the columns are the token ids in `vocabulary`."""
        last = first + len(logits)
        start = self._offsets[first]
        stop = self._offsets[last]
        ids = self._ids[start:stop]
        rows = self._positions[start:stop] - first
        local = (ids >= vocabulary.start) & (ids < vocabulary.stop)
        rows = rows[local]
        columns = ids[local] - vocabulary.start
        supported = logits[rows, columns]
        logits.masked_fill_(self._restricted[first:last, None], OUTSIDE)
        logits[rows, columns] = supported


def chunk_tokens(configured: int | None, vocabulary: int) -> int:
    """Returns the number of tokens in a chunk: `configured` if it is set, else the number of tokens whose logits occupy
    `CHUNK_BYTES`, but at least `SMALLEST_CHUNK`. `vocabulary`: number of token ids on this rank."""
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
    """Computes the log-prob of every label, and the entropy of the label's distribution: softmax(hidden @ weight^T /
    temperature), restricted to the support.

    `hidden` [T, h] and `weight` [V / TP, h] have the model's dtype. `group`: tensor-parallel ranks, among which the
    vocabulary is split in order (None: one rank). `chunk`: number of tokens processed at a time. `head`: implements the
    arithmetic of logits and log-probs (not of entropies); None for torch's.

    Returns two fp32 tensors [T], differentiable with respect to hidden and weight and equal on all ranks of the group.
    The gradient of hidden is this rank's term of a sum over the group. With `targets.top`, also returns the log-probs
    of these tokens [T, k], and the log-prob of all other tokens together [T], whose probability is at least `LEAST`."""
    if targets.top is None:
        return _LabelLogprobs.apply(hidden, weight, targets, group, chunk, head)[:2]
    return _LabelLogprobs.apply(hidden, weight, targets, group, chunk, head)


class _Context(Protocol):
    """Protocol for type checking: attributes of the autograd context that `_LabelLogprobs` uses."""

    targets: Targets
    group: dist.ProcessGroup | None
    chunk: int
    arithmetic: Head | None
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _LabelLogprobs(torch.autograd.Function):
    """Autograd function of `label_logprobs`: each rank computes statistics of each chunk, and two collectives combine
    the statistics of all chunks over the ranks."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: Targets,
        group: dist.ProcessGroup | None,
        chunk: int,
        arithmetic: Head | None,
    ) -> tuple[torch.Tensor, ...]:
        head = _OutputLayer(weight, targets, group, chunk, arithmetic)
        count = len(hidden)
        top, total, weighted, label, exact, rest = (hidden.new_zeros(count, dtype=torch.float32) for _ in range(6))
        width = 0 if targets.top is None else targets.top.shape[1]
        listed = hidden.new_zeros((count, width), dtype=torch.float32)
        for part, logits in head.chunks(hidden):
            if arithmetic is not None:
                exact[part] = arithmetic.logprobs(logits, targets.labels[part], group)
            top[part] = logits.amax(1)
            label[part] = head.at_labels(logits, part)
            logits -= top[part, None]
            exp = logits.exp()
            total[part] = exp.sum(1)
            weighted[part] = torch.linalg.vecdot(exp, logits)
            if targets.top is not None:
                indices = head.top_indices(targets.top, part)
                listed[part].index_put_(indices.slots, logits[indices.columns])
                exp[indices.columns] = 0.0
                rest[part] = exp.sum(1)
        if head.size > 1:
            local_top = top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            shift = local_top - top  # changes the offset of this rank's sums from its local maximum to the global one
            weighted = shift.exp() * (weighted + shift * total)
            total = shift.exp() * total
            label = torch.where(head.local_labels, label - top, 0.0)
            rest = shift.exp() * rest
            # Entries of tokens on other ranks must be 0 in the sum.
            listed = torch.where(head.local_top(), listed + shift[:, None], 0.0)
            sums = torch.cat([torch.stack([total, weighted, label, rest], 1), listed], 1)
            dist.all_reduce(sums, group=group)
            total, weighted, label, rest = sums[:, :4].unbind(1)
            listed = sums[:, 4:]
        else:
            label = label - top
        logprobs = label - total.log() if arithmetic is None else exact
        entropy = total.log() - weighted / total
        tail = (rest / total).clamp_min(LEAST)
        ctx.save_for_backward(hidden, weight, top, total, entropy, tail)
        ctx.targets = targets
        ctx.group = group
        ctx.chunk = chunk
        ctx.arithmetic = arithmetic
        ctx.set_materialize_grads(False)
        return logprobs, entropy, listed - total.log()[:, None], tail.log()

    @staticmethod
    def backward(
        ctx: _Context,
        logprob_grad: torch.Tensor | None,
        entropy_grad: torch.Tensor | None,
        top_grad: torch.Tensor | None,
        tail_grad: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, top, total, entropy, tail = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        with_top = top_grad is not None or tail_grad is not None
        if logprob_grad is None and entropy_grad is None and not with_top:
            return None, None, None, None, None, None
        head = _OutputLayer(weight, ctx.targets, ctx.group, ctx.chunk, ctx.arithmetic)
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        # In fp32, because a sum over chunks in bf16 would lose precision that a single product would not lose.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
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
                head.add_top_(factor, part, ctx.targets.top, top_grad, tail_grad, tail)
            grad = probs.mul_(factor)
            if logprob_grad is not None:
                head.add_at_labels_(grad, part, logprob_grad[part])
            if top_grad is not None:
                indices = head.top_indices(ctx.targets.top, part)
                grad.index_put_(indices.columns, top_grad[part][indices.slots], accumulate=True)
            if ctx.targets.temperature is not None:
                grad.div_(ctx.targets.temperature[part, None])
            grad = grad.to(weight.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = grad @ weight
            if weight_grad is not None:
                weight_grad += grad.t() @ hidden[part]
        cast_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, cast_grad, None, None, None, None


LEAST = 1e-30
"""Lower bound for the probability of all tokens outside `Targets.top` together, so that its inverse is finite in
fp32."""


class _TopIndices(NamedTuple):
    """Two pairs of index tensors for one chunk, which select those tokens of `Targets.top` that are in this rank's part
    of the vocabulary."""

    slots: tuple[torch.Tensor, torch.Tensor]
    """Index tensors that select, in the chunk's rows of `Targets.top` [C, k], the tokens in this rank's part of the
    vocabulary."""
    columns: tuple[torch.Tensor, torch.Tensor]
    """Index tensors that select, in the chunk's logits [C, V / TP], the logits of the same tokens as `slots`."""


class _OutputLayer:
    """This rank's part of the output layer, applied to the hidden states of one micro-batch in chunks of C tokens."""

    def __init__(
        self,
        weight: torch.Tensor,
        targets: Targets,
        group: dist.ProcessGroup | None,
        chunk: int,
        arithmetic: Head | None,
    ):
        self.weight = weight
        self.targets = targets
        self.chunk = chunk
        self._product = torch.nn.functional.linear if arithmetic is None else arithmetic.product
        self.size = 1
        first = 0
        if group is not None:
            self.size = group.size()
            first = len(weight) * group.rank()
        self.vocabulary = range(first, first + len(weight))
        self.local_labels = (targets.labels >= first) & (targets.labels < first + len(weight))
        """True where the label is in this rank's part of the vocabulary, bool [T]."""
        self._columns = torch.where(self.local_labels, targets.labels - first, 0)

    def chunks(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields each range of positions with its fp32 logits [C, V / TP], divided by the temperature and restricted to
        the support. The caller may change the logits."""
        for first in range(0, len(hidden), self.chunk):
            part = slice(first, min(first + self.chunk, len(hidden)))
            logits = self._product(hidden[part], self.weight).float()
            if self.targets.temperature is not None:
                logits /= self.targets.temperature[part, None]
            if self.targets.support is not None:
                self.targets.support.mask_(logits, first, self.vocabulary)
            yield part, logits

    def at_labels(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """Returns the logit of each label, [C]. For labels on other ranks the value is arbitrary and must not be
        used."""
        return logits.gather(1, self._columns[part, None])[:, 0]

    def top_indices(self, top: torch.Tensor | None, part: slice) -> _TopIndices:
        """Returns index tensors that select, at the positions `part`, those tokens of `top` that are in this rank's
        part of the vocabulary."""
        assert top is not None
        ids = top[part] - self.vocabulary.start
        rows, slots = ((ids >= 0) & (ids < len(self.vocabulary))).nonzero(as_tuple=True)
        return _TopIndices((rows, slots), (rows, ids[rows, slots]))

    def local_top(self) -> torch.Tensor:
        """Returns a mask of the tokens of `targets.top` that are in this rank's part of the vocabulary, bool [T, k];
        [T, 0] without `targets.top`."""
        if self.targets.top is None:
            return self.local_labels.new_zeros((len(self.local_labels), 0))
        return (self.targets.top >= self.vocabulary.start) & (self.targets.top < self.vocabulary.stop)

    def add_top_(
        self,
        factor: torch.Tensor,
        part: slice,
        top: torch.Tensor | None,
        top_grad: torch.Tensor | None,
        tail_grad: torch.Tensor | None,
        tail: torch.Tensor,
    ) -> None:
        """Adds to `factor` [C, V / TP] the terms of the gradients of two log-probs with respect to the logits x: the
        log-probs of the tokens in `top`, d log p_i / d x_j = [i = j] - p_j (without [i = j], which the caller adds),
        and the log-prob of the tail (all other tokens together), d log p_tail / d x_j = [j in tail] p_j / p_tail - p_j.
        The gradient of the logits is the factor times the probabilities p."""
        if top_grad is not None:
            factor.sub_(top_grad[part].sum(1, keepdim=True))
        if tail_grad is not None:
            indices = self.top_indices(top, part)
            listed = factor[indices.columns] - tail_grad[part][indices.columns[0]]
            factor.add_((tail_grad[part] * (1 / tail[part] - 1))[:, None])
            factor[indices.columns] = listed

    def add_at_labels_(self, grad: torch.Tensor, part: slice, values: torch.Tensor) -> None:
        """Adds `values` [T] to the columns of the labels in `grad`, for labels in this rank's part of the
        vocabulary."""
        grad.scatter_add_(1, self._columns[part, None], torch.where(self.local_labels[part], values, 0.0)[:, None])
