"""The tokens that top-k and top-p left to sample from, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(kw_only=True, slots=True)
class Support:
    """A ragged table: `counts[i]` entries of `ids` belong to position i, in the order of the positions.

    Two positions with 2 and 3 kept tokens between two where all were kept: counts [0, 2, 3, 0], five ids.
    """

    ids: np.ndarray
    """int32 [sum(counts)]: the token ids that were kept."""
    counts: np.ndarray
    """int32 [n]: how many at each position; 0: nothing was cut away, all tokens were kept."""

    def __post_init__(self) -> None:
        if self.counts.sum() != len(self.ids):
            raise ValueError(f"a support counts {self.counts.sum()} token ids and holds {len(self.ids)}")

    def __len__(self) -> int:
        return len(self.counts)

    def positions(self) -> np.ndarray:
        """int64 [sum(counts)]: the position of each id."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def take(self, index: np.ndarray) -> Support:
        """The positions `index`, in that order."""
        starts = np.cumsum(self.counts) - self.counts
        counts = self.counts[index]
        # Each kept id's place: the start of its position plus its number there.
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Support(ids=self.ids[np.repeat(starts[index], counts) + number], counts=counts)

    def missing(self, tokens: np.ndarray) -> np.ndarray:
        """int64: the positions whose token is not in their support. tokens [n]."""
        found = self.counts == 0
        positions = self.positions()
        found[positions[self.ids == tokens[positions]]] = True
        return np.flatnonzero(~found)

    @staticmethod
    def everything(length: int) -> Support:
        """`length` positions at which all tokens were kept."""
        return Support(ids=np.zeros(0, np.int32), counts=np.zeros(length, np.int32))

    @staticmethod
    def join(parts: Sequence[Support]) -> Support:
        """One after another; `parts` is not empty."""
        return Support(
            ids=np.concatenate([part.ids for part in parts]), counts=np.concatenate([part.counts for part in parts])
        )
