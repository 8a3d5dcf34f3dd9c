"""Section `trainer.vision`: images in prompts, and training of the vision tower."""

from __future__ import annotations

from typing import Literal

from slimx.config.section import Amount, Positive, Section, Size


class Vision(Section):
    """Images in prompts. The ranks of the first pipeline stage compute their embeddings with the vision tower."""

    train: Literal["none", "projector", "tower"] = "none"
    """Parts of the vision tower to train. none: the tower is frozen; projector: the layers that map its output to the
    language model's embeddings; tower: all of it."""
    lr_scale: Positive = 1.0
    """Factor by which the learning rate of the tower's trained parameters differs from trainer.optimizer.lr."""
    min_pixels: Amount | None = None
    """Number of pixels to which smaller images are enlarged; null: the processor's value in the model's directory."""
    max_pixels: Amount | None = None
    """Number of pixels to which larger images are reduced; null: the processor's value in the model's directory."""
    processes: Size = 2
    """Number of processes on the driver's machine that prepare images."""
