"""Tokens that top-k and top-p leave to sample from, per position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(kw_only=True, slots=True)
class Support:
    """A ragged table: `counts[i]` entries of `ids` belong to position i, in the order of the positions.

    Example: 2 and 3 tokens left at the inner two of four positions, and all tokens at the outer ones: counts
    [0, 2, 3, 0] and five ids.
    """

    ids: np.ndarray
    """int32 [sum(counts)]: token ids left to sample from."""
    counts: np.ndarray
    """int32 [n]: number of ids per position; 0: all tokens of the vocabulary."""

    def __post_init__(self) -> None:
        if self.counts.sum() != len(self.ids):
            raise ValueError(f"a support has counts for {self.counts.sum()} token ids, but {len(self.ids)} ids")

    def __len__(self) -> int:
        return len(self.counts)

    def positions(self) -> np.ndarray:
        """Returns the position of each id, int64 [sum(counts)]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def take(self, index: np.ndarray) -> Support:
        """Returns the support at the positions `index`, in that order."""
        starts = np.cumsum(self.counts) - self.counts
        counts = self.counts[index]
        # The place of an id in `ids` is the start of its position plus its offset in the position.
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Support(ids=self.ids[np.repeat(starts[index], counts) + offsets], counts=counts)

    def missing(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the positions, int64, whose token in `tokens` [n] is not in the support."""
        contained = self.counts == 0
        positions = self.positions()
        contained[positions[self.ids == tokens[positions]]] = True
        return np.flatnonzero(~contained)

    @staticmethod
    def everything(length: int) -> Support:
        """Returns the support of `length` positions with all tokens."""
        return Support(ids=np.zeros(0, np.int32), counts=np.zeros(length, np.int32))

    @staticmethod
    def join(parts: Sequence[Support]) -> Support:
        """Concatenates `parts`, which must not be empty."""
        return Support(
            ids=np.concatenate([part.ids for part in parts]), counts=np.concatenate([part.counts for part in parts])
        )
