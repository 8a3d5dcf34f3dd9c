"""Requests with images from a run's image store, for an SGLang server. Written for sglang 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from slimx.json_types import Json

_CACHED = 64
"""Number of prepared images that the server's process keeps; the rollouts of a group arrive close together."""


def set_images(request: Any, value: Json) -> None:
    """Sets the images of `request` to those that a client named in the field `stored_images`: `directory` of the store,
    and the digest, start, stop and grid of each of the `images`. SGLang takes the pixels as its own processor's output;
    the request's token ids must contain a placeholder for each embedding. Raises ValueError for a malformed digest."""
    images = value["images"]
    pixels = [_pixels(value["directory"], digest) for digest, *_ in images]
    grids = torch.tensor([grid for _, _, _, *grid in images])
    offsets = [(start, stop - 1) for _, start, stop, *_ in images]
    request.image_data = [ProcessorOutput(torch.cat(pixels), grids, offsets)]


class ProcessorOutput(dict[str, Any]):
    """Output of a processor, as SGLang accepts it instead of images. `pixels`: patches of all images; `grids`: numbers
    of patches along time, height and width, int [n, 3]; `offsets`: first and last placeholder of each image."""

    def __init__(self, pixels: torch.Tensor, grids: torch.Tensor, offsets: Sequence[tuple[int, int]]):
        # Without offsets, SGLang would search for placeholders, and find those that the model sampled too.
        super().__init__(format="processor_output", pixel_values=pixels, image_grid_thw=grids, offsets=list(offsets))
        # SGLang's processor of GLM-4.5V looks for the grids in an attribute; without them, an image has the positions
        # of text.
        self.image_grid_thw = grids


@lru_cache(_CACHED)
def _pixels(directory: str, digest: str) -> torch.Tensor:
    if not re.fullmatch(r"[0-9a-f]+", digest):
        raise ValueError(f"{digest!r} is not the digest of an image; send digests of the run's image store")
    from slimx.extras.vision.images.store import ImageStore

    return torch.from_numpy(ImageStore(directory).load(digest))
