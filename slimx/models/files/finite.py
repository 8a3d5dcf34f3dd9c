"""Refuses weights that are no finite numbers, where they are read: training, conversions and exports would go on."""

from __future__ import annotations

from pathlib import Path

import torch

from slimx.errors import SlimxError

_CODES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""The smallest code, without its sign, of an fp8 dtype that is no finite number."""


def check_finite(values: torch.Tensor, name: str, path: Path) -> None:
    """Raises SlimxError if `values`, read of tensor `name` of the checkpoint `path`, hold NaN or an infinity."""
    if not _finite(values):
        raise SlimxError(
            f"{path}: tensor {name} holds NaN or infinite values; restore the file from its source",
            code="checkpoint.finite",
            about=name,
        )


def _finite(values: torch.Tensor) -> bool:
    """Sums are not finite where a value is not, and of all reductions the cheapest: those of columns where values do
    not lie together. A sum of finite values may overflow; the smallest and the largest value decide then."""
    if (least := _CODES.get(values.dtype)) is not None:
        return values.numel() == 0 or bool((values.view(torch.uint8) & 0x7F).max() < least)
    sums = values.sum() if values.is_contiguous() else values.sum(0)
    return bool(sums.isfinite().all()) or bool(torch.stack(values.aminmax()).isfinite().all())
