"""Blocks of fp8 that are widened again and again, by the kernel of a publication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slimx.extras.low_precision.blocks import dequantising
from slimx.reshard.kernels import cpu as kernel


class Widener:
    """Dequantises matrices of one stack again and again; what it is made of is checked once."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype):
        """codes [n, rows, cols], and scales of each as for `dequantise`: both keep their memory, and are read anew at
        every call."""
        self._held, self._dtype = (codes, scales), dtype
        out = torch.empty(1, *codes.shape[1:], dtype=dtype)
        self._nbytes = out.nbytes
        self._sums, self._flags = np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint32)
        matrices = zip(codes, scales, strict=True)
        pieces = [dequantising(one, own, out[0], block) for one, own in matrices]
        for piece in pieces:
            kernel.pack(piece, out.view(-1).view(torch.uint8), self._sums, self._flags)
        self._pieces = np.concatenate(pieces)

    def reads(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Returns True if these are the tensors that it was made for."""
        return all(
            held.data_ptr() == now.data_ptr() and held.shape == now.shape
            for held, now in zip(self._held, (codes, scales), strict=True)
        )

    def __call__(self, which: Sequence[int]) -> torch.Tensor:
        """The matrices of these numbers, [numbers, rows, cols]."""
        out = torch.empty(len(which), *self._held[0].shape[1:], dtype=self._dtype)
        if len(which):
            pieces = self._pieces[list(which)]
            pieces["dst"] = np.arange(len(which)) * self._nbytes
            kernel.pack_checked(pieces, out.view(-1).view(torch.uint8), self._sums, self._flags)
        return out
