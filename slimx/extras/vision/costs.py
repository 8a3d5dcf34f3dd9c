"""Memory and FLOPs of a vision tower, for the planner.

Every rank of the first pipeline stage computes all images of a micro-batch, also with tensor and context parallelism,
and recomputes nothing. The number of images is unknown before the run, so the figures are upper bounds: all tokens of a
micro-batch are placeholders of different images, except that they are no more than the prompts of a step can have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from slimx.layout.table import Row
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import MicrobatchSetting

FP32 = 4
_CORNERS = 4
"""Number of entries of the position embedding from which that of a patch is interpolated."""

_POSITIONS = re.compile(r"pos_emb|position_embedding")
"""Pattern of the names of tables of position embeddings, by which nothing is multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerCosts:
    """Bytes and FLOPs of one vision tower."""

    vision: HfConfig
    """Fields of the tower, as in `VisionFamily._vision`."""
    rows: tuple[Row, ...]
    """Rows of the tower's parameters."""
    projector: tuple[str, ...]
    """Prefixes of the projector's parameters."""
    levels: int
    """As in `Tower.levels`."""
    train: Literal["none", "projector", "tower"]
    """The value of `trainer.vision.train`."""
    hidden: int
    """Hidden size of the language model."""
    prompt: int | None
    """Maximum number of tokens in a prompt; None if it is unknown."""
    prompts: int
    """Number of prompts in a step."""
    image: int | None
    """Maximum number of patches in an image; None if it is unknown."""

    def kept_bytes(self, setting: MicrobatchSetting) -> float:
        """Returns the number of bytes that a micro-batch keeps until its backward pass: the features for the first
        decoder layers; and for layers that are trained, the inputs of each linear layer, and of the norm, activation
        function or attention before it."""
        embeddings = self._embeddings(setting)
        elements = self.levels * setting.tokens / setting.sizes.tensor * self.hidden
        if self.train != "none":
            elements *= 2  # with gradients, which the backward pass of the decoder sums
            elements += 2 * embeddings * sum(columns for _, columns in self._matrices(projector=True))
        if self.train == "tower":
            inputs = sum(columns for _, columns in self._matrices(projector=False))
            # Nothing precedes the first layer. Attention also keeps packed projections, and rotated queries and keys.
            inputs = 2 * inputs - self._patch + 5 * self.vision["depth"] * self.vision["hidden_size"]
            if any(".gate_proj." in row.name for row in self.rows):
                # The activation's output and the product of gates; the first RMSNorm's input is kept in fp32.
                inputs += 2 * self.vision["depth"] * (self.vision["intermediate_size"] + self.vision["hidden_size"])
            elements += self._patches(embeddings) * inputs
        return elements * setting.itemsize

    def work_bytes(self, setting: MicrobatchSetting) -> float:
        """Returns the number of bytes of temporary memory for the embeddings of one micro-batch, the larger of two: the
        tower's pixels and its most demanding step; or its outputs and their way to the placeholders."""
        embeddings = self._embeddings(setting)
        patches = self._patches(embeddings)
        item = setting.itemsize
        size = self.vision["hidden_size"]
        rotated = 4 if item == FP32 else 6  # of queries or keys, in fp32; and copies of both if they are in bf16
        attention = 5 * size * item + rotated * size * FP32
        mlp = 2 * (size + self.vision["intermediate_size"]) * item
        positions = size * ((2 + _CORNERS) * item + (1 + _CORNERS) * FP32)
        tower = patches * (self._patch * item + max(attention, mlp, positions))
        # Gathered embeddings, zeros for all tokens of this context-parallel rank, and their sum.
        scattered = patches * size * item + 3 * setting.tokens * self.hidden * item
        outputs = (1 + self.levels) * embeddings + setting.tokens / setting.sizes.tensor  # and embeddings of words
        return max(tower, scattered) + outputs * self.hidden * item

    def rollout_flops(self) -> float:
        """Returns the FLOPs of a rollout's images, with the backward pass of what is trained, if its prompt consists of
        images of the maximum size; 0 if the length of prompts is unknown."""
        embeddings = self.prompt or 0
        patches = self._patches(embeddings)
        attended = patches if self.image is None else min(self.image, patches)
        per_patch = sum(map(prod, self._matrices(projector=False)))
        per_patch += 2 * self.vision["depth"] * self.vision["hidden_size"] * attended
        per_embedding = sum(map(prod, self._matrices(projector=True)))
        flops = 2.0 * patches * per_patch * (3 if self.train == "tower" else 1)
        return flops + 2.0 * embeddings * per_embedding * (1 if self.train == "none" else 3)

    def _embeddings(self, setting: MicrobatchSetting) -> int:
        """Returns the maximum number of different embeddings in a micro-batch. An image that several rollouts have is
        computed once."""
        tokens = setting.tokens * setting.sizes.context
        return tokens if self.prompt is None else min(tokens, self.prompt * self.prompts)

    def _patches(self, embeddings: int) -> int:
        merged: int = self.vision["spatial_merge_size"] ** 2
        return embeddings * merged

    @property
    def _patch(self) -> int:
        """Number of elements in a patch of pixels."""
        return next(prod(shape[1:]) for shape in self._shapes(projector=False) if len(shape) > 2)

    def _matrices(self, *, projector: bool) -> list[tuple[int, int]]:
        """Returns the shapes of the weights by which every embedding (projector) or every patch is multiplied."""
        return [(shape[0], prod(shape[1:])) for shape in self._shapes(projector=projector)]

    def _shapes(self, *, projector: bool) -> Iterable[tuple[int, ...]]:
        for row in self.rows:
            ((_, shape),) = row.sources
            if row.name.startswith(self.projector) == projector and len(shape) > 1 and not _POSITIONS.search(row.name):
                yield shape
