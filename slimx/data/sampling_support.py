"""Tokens that top-k and top-p leave for sampling, at each position of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(kw_only=True, slots=True)
class Support:
    """Ragged table of the tokens that top-k and top-p leave for sampling: position i has `counts[i]` entries of `ids`,
    in the order of the positions.

    Example: if only the middle two of four positions were sampled, from 2 and 3 tokens, `counts` is [0, 2, 3, 0], and
    `ids` has five entries.
    """

    ids: np.ndarray
    """int32 [sum(counts)]: token ids, position by position."""
    counts: np.ndarray
    """int32 [n]: number of ids per position; 0 allows the whole vocabulary."""

    def __post_init__(self) -> None:
        if self.counts.sum() != len(self.ids):
            raise ValueError(
                f"a support has ids of length {len(self.ids)}, but counts with the sum {self.counts.sum()}"
            )

    def __len__(self) -> int:
        return len(self.counts)

    def positions(self) -> np.ndarray:
        """Returns the position to which each entry of `ids` belongs, int64 [sum(counts)]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def take(self, index: np.ndarray) -> Support:
        """Returns the support at the positions in `index`, in that order."""
        starts = np.cumsum(self.counts) - self.counts
        counts = self.counts[index]
        # The index of an id in `ids` is the start of its position plus its offset in the position.
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Support(ids=self.ids[np.repeat(starts[index], counts) + offsets], counts=counts)

    def missing(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the positions, int64, at which the token in `tokens` [n] is not among those left for sampling."""
        contained = self.counts == 0
        positions = self.positions()
        contained[positions[self.ids == tokens[positions]]] = True
        return np.flatnonzero(~contained)

    @staticmethod
    def everything(length: int) -> Support:
        """Returns a support that allows the whole vocabulary at each of `length` positions."""
        return Support(ids=np.zeros(0, np.int32), counts=np.zeros(length, np.int32))

    @staticmethod
    def join(parts: Sequence[Support]) -> Support:
        """Concatenates `parts`, of which there must be at least one, along the position dimension."""
        return Support(
            ids=np.concatenate([part.ids for part in parts]), counts=np.concatenate([part.counts for part in parts])
        )
