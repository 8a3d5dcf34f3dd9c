"""Inputs and result of a loss function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slimx.data.columns import LossColumns

LARGEST_LOG_RATIO = 20.0
"""Bound of a log-ratio. exp(20) is 5e8: far beyond any clip range, and finite in fp32 when squared. verl and OpenRLHF
use the same bound."""

SequenceSum = Callable[[torch.Tensor], torch.Tensor]
"""[T] -> [T]: at every token the sum over its sequence, including tokens on other context-parallel ranks. Collective
there, no gradient."""


class TopLogprobs(NamedTuple):
    """Log-probs at a teacher's top-k tokens of each position, of the policy and the teacher."""

    policy: torch.Tensor
    """[T, k], with gradient."""
    policy_rest: torch.Tensor
    """[T]: log-probs of all other tokens together, with gradient."""
    teacher: torch.Tensor
    """[T, k]."""


@dataclass(slots=True, kw_only=True)
class LossInputs(LossColumns[torch.Tensor]):
    """Columns and computed tensors of one micro-batch, each [T]; log-probs are those of the label under
    softmax(logits / temperature), over the tokens that top-k and top-p kept when it was sampled."""

    logprobs: torch.Tensor
    """Log-probs of the policy, with gradient."""
    old_logprobs: torch.Tensor
    """Denominator of the ratio: the engine's log-probs, or the trainer's before the step (algorithm.old_logprobs)."""
    reference_logprobs: torch.Tensor | None = None
    """Log-probs of the reference (algorithm.reference)."""
    top: TopLogprobs | None = None
    """Log-probs at the teacher's top-k tokens (algorithm.teacher_top_k)."""
    entropy: torch.Tensor | None = None
    """Entropy of the distribution of each label, in nats, with gradient."""
    sequence_sum: SequenceSum | None = None
    """Sums over sequences; None: the whole micro-batch is one sequence on one rank."""


Loss = Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's part of the loss (a weighted sum) and metrics that add up over micro-batches."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Computes exp(log_ratio) with log_ratio within +-`LARGEST_LOG_RATIO`; beyond, it is constant without gradient.

    Unbounded, a log-ratio above 88 is infinite in fp32, and a subsequent clip multiplies infinity by 0."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
