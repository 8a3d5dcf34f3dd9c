"""Rounds a trainer's weights to the values that engines have after a block-fp8 publication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from slimx.extras.low_precision.blocks import dequantize
from slimx.layout.number_formats import ModelDtype, Precision, Quantization
from slimx.layout.parts import Part, matrix
from slimx.reshard.pack.packer import Packer
from slimx.reshard.plan.copy_plan import compile_plan

_ONE_BUCKET = 2**62
"""Bucket size in bytes that is larger than any rank's weights, so that a plan has a single bucket."""


class ServedWeights:
    """Copies of one rank's weights that a publication quantizes, rounded to fp8 by the publication's kernel and
    converted back to the model's dtype.

    The weights are quantized by a copy plan whose source and target are both the rank's own parts. Like any copy plan,
    this one checks that shards consist of whole blocks of the checkpoint's tensors, so that all layouts of trainers and
    engines produce the same codes. Memory use: one byte per weight for the codes, and as much as the weights themselves
    for the values.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        parameters: Mapping[str, torch.Tensor],
        quantization: Quantization,
        dtype: ModelDtype,
    ):
        """Prepares the rounding. `parts`: the rank's parts of checkpoint tensors; `parameters`: the rank's tensors in
        host memory, by the parts' names; `quantization`: block size and rule; `dtype`: the model's dtype. Raises
        SlimxError if a shard cuts a block; the error names the first such shard."""
        quantized = [part._replace(ranks=(0,)) for part in parts if part.quantized]
        precision = Precision(dtype, dtype, quantization)
        plan = compile_plan(quantized, quantized, precision=precision, bucket_bytes=_ONE_BUCKET)
        self._packer = Packer(plan, 0, {part.name: parameters[part.name] for part in quantized})
        form = self._packer.form(0)
        self._codes = torch.zeros(form.size, dtype=torch.uint8)
        values_dtype = getattr(torch, dtype)
        self.values = {part.name: torch.zeros(part.shape, dtype=values_dtype) for part in quantized}
        """Values that engines would have after a publication of the weights at the last `refresh`, by parameter name;
        zeros before the first `refresh`."""
        self._block = quantization.block
        self._rounded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """fp8 codes and their scales, each as a matrix, by parameter name."""
        packed = {}
        for tensor, start in zip(form.tensors, form.offset.tolist(), strict=True):
            data = self._codes[start : start + tensor.nbytes]
            packed[tensor.name] = data, matrix(tensor.shape)
        codes_suffix, scales_suffix = quantization.suffixes
        for name in self.values:
            codes, codes_shape = packed[name + codes_suffix]
            scales, scales_shape = packed[name + scales_suffix]
            self._rounded[name] = codes.view(codes_shape), scales.view(torch.float32).view(scales_shape)

    def refresh(self) -> None:
        """Updates `values` from the parameters' current values. Does not check for non-finite values: they become
        visible in the loss, and a publication refuses parameters that contain them."""
        if not self.values:
            return
        self._packer.refresh_addresses()
        self._packer.pack(0, self._codes)
        for name, value in self.values.items():
            value.copy_(dequantize(*self._rounded[name], self._block, value.dtype).view(value.shape))
