"""From the configuration's algorithm to its loss and advantages."""

from __future__ import annotations

from slimx.algorithms.losses import Loss, policy_loss, sft_loss
from slimx.config.schema import Algorithm


def make_loss(algorithm: Algorithm) -> Loss:
    """The loss function of a configured algorithm."""
    if algorithm.name == "sft":
        return sft_loss
    return policy_loss(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, kl_coef=algorithm.kl_coef)
