"""Description of a vision tower, from which the rows of its weights and its module are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimx.errors import SlimxError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Vision tower of a model, and the way in which its language model receives embeddings of images."""

    module: str
    """Class of the tower in transformers, as MODULE:NAME."""
    fields: Mapping[str, Any]
    """Fields of the tower in config.json (vision_config)."""
    merge: int
    """Number of patches, per axis, that are merged into one embedding."""
    axes: tuple[int, ...] | None
    """For each frequency of the rotary embedding, the position axis that it rotates by: 0 time, 1 height, 2 width
    (M-RoPE). None: embeddings of images have the positions of ordinary tokens."""
    levels: int = 0
    """Number of first decoder layers whose outputs the tower adds features to (deepstack)."""


def rotary_axes(frequencies: int, sections: tuple[int, int, int], *, interleaved: bool) -> tuple[int, ...]:
    """Returns `Tower.axes` for M-RoPE. `frequencies`: number of frequencies, half of the rotated dimensions of a head;
    `sections`: number of frequencies of each axis. `interleaved`: True if axes alternate (Qwen3-VL), False if each axis
    has consecutive frequencies (Qwen2.5-VL)."""
    if sum(sections) != frequencies:
        raise SlimxError(
            f"mrope_section in config.json is {list(sections)}, but a head has {frequencies} frequencies; restore "
            "config.json from the checkpoint's source",
            code="vision.sections",
            about="mrope_section",
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * frequencies
    for axis in (1, 2):
        for index in range(axis, 3 * sections[axis], 3):
            axes[index] = axis
    return tuple(axes)
