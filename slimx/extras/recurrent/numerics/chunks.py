"""Cuts packed sequences into chunks of CHUNK tokens, for the gated delta rule and the state-space rule. Both rules
compute all chunks in parallel and pass only states from chunk to chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK


class Chunks:
    """Map between packed sequences of `lengths` tokens and a batch of their chunks. A sequence's last chunk is padded
    with zeros, which do not change the sequence's state. `order`: indices of the sequences, longest first."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        counts = torch.tensor([-(-length // CHUNK) for length in lengths])
        self.order = counts.argsort(descending=True, stable=True)
        starts = counts.cumsum(0) - counts
        self.steps = []
        """List whose element i contains the indices, in the batch of chunks, of chunk i of every sequence that has such
        a chunk; sequences are in the order of `order`."""
        for index in range(int(counts.max())):
            sequences = int((counts > index).sum())
            self.steps.append((starts[self.order][:sequences] + index).to(device))
        sizes = torch.tensor(list(lengths))
        inside = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        self._rows = (starts.repeat_interleave(sizes) * CHUNK + inside).to(device)
        self._count = int(counts.sum())
        self.order = self.order.to(device)

    def lay(self, x: torch.Tensor) -> torch.Tensor:
        """Arranges packed tokens [T, ...] as padded chunks [chunks, CHUNK, ...]."""
        padded = x.new_zeros(self._count * CHUNK, *x.shape[1:]).index_copy(0, self._rows, x)
        return padded.view(self._count, CHUNK, *x.shape[1:])

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the packed tokens [T, ...] in padded chunks [chunks, CHUNK, ...], without the padding; inverse of
        `lay`."""
        return x.flatten(0, 1)[self._rows]
