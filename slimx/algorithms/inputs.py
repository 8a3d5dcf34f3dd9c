"""Types of a loss function's inputs and result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slimx.data.columns import LossColumns

LARGEST_LOG_RATIO = 20.0
"""Bound on the absolute value of log-ratios. exp(20) is 5e8: far beyond any clip range, and still finite in fp32 when
squared. verl and OpenRLHF use the same bound."""

SequenceSum = Callable[[torch.Tensor], torch.Tensor]
"""Function that maps values [T] to sums [T]: each token's value is replaced with the sum over its sequence, including
tokens on other context-parallel ranks. With context parallelism the call is collective. The result has no gradient."""


class TopLogprobs(NamedTuple):
    """Log-probs that policy and teacher assign to the teacher's top-k tokens at each position."""

    policy: torch.Tensor
    """[T, k]: the policy's log-probs, with gradient."""
    policy_rest: torch.Tensor
    """[T]: log of the total probability that the policy assigns to all tokens outside the teacher's top k, with
    gradient."""
    teacher: torch.Tensor
    """[T, k]: the teacher's log-probs."""


@dataclass(slots=True, kw_only=True)
class LossInputs(LossColumns[torch.Tensor]):
    """Columns of one micro-batch and tensors computed from its forward pass, each [T].

    Log-probs are those of the label under softmax(logits / temperature), restricted to the tokens that top-k and top-p
    kept when the label was sampled."""

    logprobs: torch.Tensor
    """Log-probs under the policy, with gradient."""
    old_logprobs: torch.Tensor
    """Log-probs in the denominator of the importance ratio: the engine's, or the trainer's before the step
    (algorithm.old_logprobs)."""
    reference_logprobs: torch.Tensor | None = None
    """Log-probs under the reference model (`algorithm.reference`); None if there is no reference model."""
    top: TopLogprobs | None = None
    """Log-probs at the teacher's top-k tokens; None if `algorithm.teacher_top_k` is not set."""
    entropy: torch.Tensor | None = None
    """Entropy of the distribution that predicts each label, in nats, with gradient; None if the algorithm does not use
    it."""
    sequence_sum: SequenceSum | None = None
    """Function that sums over sequences; None: the whole micro-batch is one sequence on one rank."""


Loss = Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Function that returns (contribution of a micro-batch to the loss, metrics). The contribution is a weighted sum over
the micro-batch's tokens; metrics are summed over micro-batches."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Computes exp(log_ratio), with the log-ratio clamped to +-`LARGEST_LOG_RATIO`. Outside these bounds the result is
    constant and has no gradient.

    Without the bounds, the ratio would be infinite in fp32 for a log-ratio above 88, and a subsequent clip would
    multiply infinity by 0."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
