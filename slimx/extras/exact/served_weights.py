"""A trainer's weights as its engines hold them after a publication in blocks of fp8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from slimx.extras.low_precision.blocks import dequantise
from slimx.layout.number_formats import ModelDtype, Precision, Quantisation
from slimx.layout.parts import Part, matrix
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
        self.values = {part.name: torch.zeros(part.shape, dtype=getattr(torch, dtype)) for part in own}
        """By name what engines compute with, as of the last `refresh`."""
        self._block, self._rounded = quantisation.block, {}
        """Block, and by name codes and scales as matrices."""
        for name in self.values:
            (codes, run), (scales, run_of_scales) = (held[name + suffix] for suffix in quantisation.suffixes)
            of_scales = run_of_scales.view(torch.float32).view(matrix(scales.shape))
            self._rounded[name] = run.view(matrix(codes.shape)), of_scales

    def refresh(self) -> None:
        """The parameters have new values: round them again. What is not finite shows in the loss here, and a
        publication refuses it by name."""
        if not self.values:
            return
        self._packer.refresh_addresses()
        self._packer.pack(0, self._codes)
        for name, value in self.values.items():
            value.copy_(dequantise(*self._rounded[name], self._block, value.dtype).view(value.shape))
