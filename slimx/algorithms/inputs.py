"""Inputs and result of a loss function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slimx.data.columns import LossColumns

LARGEST_LOG_RATIO = 20.0
"""Bound of a log-ratio. exp(20) is 5e8: far outside any bound of a ratio, and finite in fp32 with its square. verl and
OpenRLHF use the same bound."""

SequenceSum = Callable[[torch.Tensor], torch.Tensor]
"""[T] -> [T]: at every token the sum over all tokens of its sequence, also those that context parallelism gave to other
ranks. Collective there, no gradient."""


class TopLogprobs(NamedTuple):
    """The policy at a teacher's k likeliest tokens of each position, and the teacher."""

    policy: torch.Tensor
    """[T, k], with gradient."""
    policy_rest: torch.Tensor
    """[T]: of all other tokens together, with gradient."""
    teacher: torch.Tensor
    """[T, k]."""


@dataclass(slots=True, kw_only=True)
class LossInputs(LossColumns[torch.Tensor]):
    """Columns and computed tensors of one micro-batch, each [T]; log-probs are of the label under
    softmax(logits / temperature), over the tokens that top-k and top-p kept when it was sampled."""

    logprobs: torch.Tensor
    """The policy's, with gradient."""
    old_logprobs: torch.Tensor
    """Denominator of the ratio: the engine's, or the trainer's own before the step (algorithm.old_logprobs)."""
    reference_logprobs: torch.Tensor | None = None
    """The reference's (algorithm.reference)."""
    top: TopLogprobs | None = None
    """Log-probs at the teacher's likeliest tokens (algorithm.teacher_top_k)."""
    entropy: torch.Tensor | None = None
    """Entropy of the distribution that each label is from, in nats, with gradient."""
    sequence_sum: SequenceSum | None = None
    """None: the whole micro-batch is one sequence on one rank."""


Loss = Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's part of the loss (a sum, already weighted) and metrics that add up the same way."""


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), with log_ratio within +-`LARGEST_LOG_RATIO`; beyond it the ratio is constant and has no gradient.

    Unbounded, a log-ratio above 88 is infinite in fp32, and a clip behind it multiplies that by 0."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
