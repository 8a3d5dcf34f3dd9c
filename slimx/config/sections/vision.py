"""Section `trainer.vision`: images in prompts, and training of the vision tower."""

from __future__ import annotations

from typing import Literal

from slimx.config.section import Section


class Vision(Section):
    """Images in prompts. The ranks of the first pipeline stage compute their embeddings with the vision tower."""

    train: Literal["none", "projector", "tower"] = "none"
    """Parts of the vision tower to train. none: the tower is frozen; projector: the layers that map its output to the
    language model's embeddings; tower: all of it."""
