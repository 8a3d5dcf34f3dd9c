"""Routed experts of a Hugging Face directory in INT4, and the config.json that declares them, in compressed-tensors'
format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from slimx.errors import SlimxError
from slimx.extras.convert.compare import compare_int4
from slimx.extras.convert.formats.safetensors import Tensor, Unit
from slimx.extras.convert.sources import Advance, Reading, Shape, row_blocks
from slimx.extras.low_precision import int4
from slimx.extras.low_precision import int4_kernel as kernel
from slimx.extras.low_precision.int4 import experts, rounds
from slimx.json_types import Json
from slimx.layout.table import Table
from slimx.models.families import ModelSpec


def experts_of(table: Table) -> frozenset[str]:
    """Returns the names of the checkpoint tensors that contain matrices of routed experts.

    Raises SlimxError naming a tensor whose number of columns is not a multiple of the group size."""
    names: set[str] = set()
    for entry in experts(table):
        for name, (_, shape) in zip(entry.sources, entry.row.sources, strict=True):
            if shape[1] % int4.GROUP:
                raise SlimxError(
                    f"tensor {name} has {shape[1]} columns, but must have a multiple of {int4.GROUP} columns in "
                    "INT4; convert the model with `slimx convert hf-to-fp8` instead",
                    code="convert.groups",
                    about=name,
                )
            names.add(name)
    return frozenset(names)


def quantized(name: str, shape: Shape) -> Unit:
    """Plans the output of a matrix in INT4: its codes, followed by its scales and its shape."""
    packed = int4.packed_shapes(shape)

    def parts(reading: Reading) -> Iterator[torch.Tensor]:
        scales = []
        for rect in row_blocks(shape, 4):
            values = reading.read(name, rect)
            if values.dtype == torch.float16:
                values = values.float()
            codes, part, _ = kernel.quantize(values.contiguous(), threads=1)
            scales.append(part)
            yield codes
        yield torch.cat(scales)
        yield torch.tensor(shape)

    def compare(source: Reading, written: Reading, advance: Advance) -> None:
        compare_int4(name, shape, source, written, advance)

    dtypes = {int4.CODES: torch.int32, int4.SCALES: torch.bfloat16, int4.SHAPE: torch.int64}
    tensors = tuple(Tensor(name + suffix, dtype, packed[suffix]) for suffix, dtype in dtypes.items())
    return Unit(tensors, parts, compare)


def served_plain(spec: ModelSpec) -> Iterator[str]:
    """Yields the names under which SGLang looks up the matrices that its layers keep unquantized. Checkpoint matrices
    that SGLang fuses into one appear under the name of the fused matrix. Yields nothing if SGLang does not serve the
    model."""
    try:
        table = spec.engine_table()
    except SlimxError:
        return
    for entry in table.entries():
        if not rounds(entry.row) and any(len(shape) > 1 for _, shape in entry.row.sources):
            # SGLang looks up the layers of Kimi-K2.5's language model without the prefix of their parameters.
            yield entry.row.name.format(layer=entry.layer, expert=entry.expert).removeprefix("language_model.")


def with_quantization(hf: Json, plain: Iterable[str]) -> Json:
    """Returns `hf`, the contents of config.json, with quantization settings for INT4 weights added, for SGLang and
    transformers. `plain`: names of the matrices that are not quantized."""
    group = {
        "targets": ["Linear"],
        "weights": {**int4.SCHEME, "dynamic": False, "actorder": None},
        "input_activations": None,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({name.removesuffix(".weight") for name in plain}),
    }
    return {**hf, "quantization_config": config}
