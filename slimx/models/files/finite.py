"""Refuses weights that are no finite numbers, where they are read: training, conversions and exports would go on."""

from __future__ import annotations

from pathlib import Path

import torch

from slimx.errors import SlimxError


def check_finite(values: torch.Tensor, name: str, path: Path) -> None:
    """Raises SlimxError if `values`, read of tensor `name` of the checkpoint `path`, hold NaN or an infinity.

    Sums are not finite where a value is not, and of all reductions the cheapest: those of columns where values do not
    lie together. A sum of finite values may overflow; the smallest and the largest value decide then."""
    sums = values.sum() if values.is_contiguous() else values.sum(0)
    if not sums.isfinite().all() and not torch.stack(values.aminmax()).isfinite().all():
        raise SlimxError(
            f"{path}: tensor {name} holds NaN or infinite values; restore the file from its source",
            code="checkpoint.finite",
            about=name,
        )
