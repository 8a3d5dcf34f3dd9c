"""Advantages of a group's rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def grpo(rewards: Sequence[float], *, normalize_std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """Group-relative advantages, float32 [n]: (r - mean) / (std + eps) (DeepSeekMath, 2402.03300).

    The standard deviation is the unbiased one (n - 1). A group of one rollout has no baseline: its advantage is 0.
    Without `normalize_std` the division is left out (Dr. GRPO, 2503.20783).
    """
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    if normalize_std and len(values) > 1:
        centred = centred / (values.std(ddof=1) + eps)
    return centred.astype(np.float32)
