"""Positions of the tokens of packed sequences with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slimx.data.records import Image


def positions_of(length: int, images: Sequence[Image], merge: int) -> np.ndarray:
    """Returns the M-RoPE positions (time, height, width) of a sequence, int64 [3, length], as in Qwen2-VL (2409.12191,
    2.1). A text token has the same position on all axes, one above the highest before it; embeddings of an image have
    the positions of its patches, counted from there. `merge`: number of patches per axis in one embedding."""
    parts: list[np.ndarray] = []
    stop = 0
    following = 0
    for image in images:
        count = image.start - stop
        parts.append(_text(following, count))
        frames, high, wide = image.grid
        shape = (frames, high // merge, wide // merge)
        grid = np.indices(shape).reshape(3, -1) + following + count
        parts.append(grid)
        stop = image.stop
        following = int(grid.max()) + 1
    parts.append(_text(following, length - stop))
    return np.concatenate(parts, axis=1)


def packed_positions(lengths: Sequence[int], images: Sequence[Sequence[Image]], merge: int) -> np.ndarray:
    """Returns `positions_of` each of the packed sequences, int64 [3, T]. `images`: the images of each sequence; those
    after the last entry have none."""
    shown = [*images, *[()] * (len(lengths) - len(images))]
    return np.concatenate([positions_of(*pair, merge) for pair in zip(lengths, shown, strict=True)], axis=1)


def _text(first: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(first, first + count), (3, count))


def placeholders(
    lengths: Sequence[int], images: Sequence[Sequence[Image]], first: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the placeholder tokens of all packed sequences, and for each one the index of its
    embedding, both int64 [n]. `first`: index of the first embedding of each image, by digest; an image that occurs
    several times has the same embeddings."""
    tokens: list[np.ndarray] = []
    embeddings: list[np.ndarray] = []
    start = 0
    for length, shown in zip(lengths, images, strict=False):
        for image in shown:
            tokens.append(np.arange(image.start, image.stop) + start)
            embeddings.append(np.arange(image.stop - image.start) + first[image.digest])
        start += length
    if not tokens:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(tokens), np.concatenate(embeddings)
