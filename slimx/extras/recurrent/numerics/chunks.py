"""Packed sequences cut into chunks, for rules whose states follow each other from chunk to chunk alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK


class Chunks:
    """Packed sequences, longest first, as a batch of chunks; a sequence's last one is padded with zeros, which change
    no state."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        counts = torch.tensor([-(-length // CHUNK) for length in lengths])
        self.order = counts.argsort(descending=True, stable=True)
        starts = counts.cumsum(0) - counts
        self.steps = [
            (starts[self.order][: int((counts > number).sum())] + number).to(device)
            for number in range(int(counts.max()))
        ]
        """Chunks that are next, one of each sequence that is long enough, in the order of `order`."""
        sizes = torch.tensor(list(lengths))
        inside = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        self._places = (starts.repeat_interleave(sizes) * CHUNK + inside).to(device)
        self._count = int(counts.sum())
        self.order = self.order.to(device)

    def lay(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [chunks, CHUNK, ...]."""
        whole = x.new_zeros(self._count * CHUNK, *x.shape[1:]).index_copy(0, self._places, x)
        return whole.view(self._count, CHUNK, *x.shape[1:])

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """[chunks, CHUNK, ...] -> [T, ...]."""
        return x.flatten(0, 1)[self._places]
