"""A trainer's weights as its engines hold them after a publication in blocks of fp8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from slimx.extras.low_precision.blocks import dequantising
from slimx.layout.number_formats import ITEMSIZE, ModelDtype, Precision, Quantisation
from slimx.layout.parts import Part, matrix
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.pack.packer import Packer
from slimx.reshard.plan.copy_plan import compile_plan

_ONE_BUCKET = 2**62
"""Bytes."""


class ServedWeights:
    """One rank's quantised weights: rounded by the publication's own kernel, and back in the model's dtype.

    A plan from the rank's parts to themselves quantises them where they are, which proves as any plan does that shards
    consist of whole blocks of the checkpoint's tensors: every layout of trainers and engines makes the same codes.
    Costs a byte per weight for the codes, and as much as the weights themselves for the values.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        parameters: Mapping[str, torch.Tensor],
        quantisation: Quantisation,
        dtype: ModelDtype,
    ):
        """`parts`: what the rank holds; `parameters`: by the parts' names, in host memory. Raises SlimxError naming a
        shard that a block would cross."""
        own = [part._replace(ranks=(0,)) for part in parts if part.quantised]
        plan = compile_plan(own, own, precision=Precision(dtype, dtype, quantisation), bucket_bytes=_ONE_BUCKET)
        self._packer = Packer(plan, 0, {part.name: parameters[part.name] for part in own})
        form = self._packer.form(0)
        self._codes = torch.zeros(form.size, dtype=torch.uint8)
        places = zip(form.tensors, form.offset.tolist(), strict=True)
        held = {tensor.name: (tensor, self._codes[start : start + tensor.nbytes]) for tensor, start in places}
        sizes = [np.prod(part.shape, dtype=np.int64) * ITEMSIZE[dtype] for part in own]
        ends = np.cumsum([0, *sizes]).tolist()
        self._values = torch.zeros(ends[-1], dtype=torch.uint8)
        self.values: dict[str, torch.Tensor] = {}
        """By name what engines compute with, as of the last `refresh`."""
        pieces, suffixes = [], quantisation.suffixes
        for number, part in enumerate(own):
            wide = self._values[ends[number] : ends[number + 1]].view(getattr(torch, dtype)).view(part.shape)
            self.values[part.name] = wide
            (codes, run), (scales, run_of_scales) = (held[part.name + suffix] for suffix in suffixes)
            of_codes = run.view(matrix(codes.shape))
            of_scales = run_of_scales.view(torch.float32).view(matrix(scales.shape))
            rows = wide.view(matrix(part.shape))
            pieces.append(dequantising(of_codes, of_scales, rows, quantisation.block, start=ends[number]))
        self._pieces = np.concatenate(pieces) if pieces else None

    def refresh(self) -> None:
        """The parameters have new values: round them again."""
        if self._pieces is None:
            return
        self._packer.refresh_addresses()
        self._packer.pack(0, self._codes)
        # What is not finite shows in the loss here, and a publication refuses it by name.
        flags = np.zeros(1, dtype=np.uint32)
        kernel.pack(self._pieces, self._values, np.zeros(1, dtype=np.uint64), flags)
