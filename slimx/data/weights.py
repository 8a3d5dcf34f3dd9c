"""The weight of every trained token in the loss, with the global denominator inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from slimx.data.records import Trajectory
from slimx.errors import SlimxError


def loss_weights(trajectories: Sequence[Trajectory], aggregation: Literal["token", "sample"]) -> list[np.ndarray]:
    """Weight of every predicted token, float32 [L-1] per trajectory; all weights together sum to 1.

    token: each trained token counts alike (DAPO, 2503.14476). sample: each trajectory counts alike, and within it each
    trained token (the original GRPO, 2402.03300). Raises SlimxError if the batch trains no token at all.
    """
    masks = [t.loss_mask[1:].astype(np.float64) for t in trajectories]
    trained = [mask.sum() for mask in masks]
    if not sum(trained):
        raise SlimxError("the batch trains no token: every loss_mask is zero; check the generate hook's loss_mask")
    if aggregation == "token":
        total = sum(trained)
        return [(mask / total).astype(np.float32) for mask in masks]
    samples = sum(1 for count in trained if count)
    return [(mask / (samples * max(count, 1))).astype(np.float32) for mask, count in zip(masks, trained, strict=True)]
