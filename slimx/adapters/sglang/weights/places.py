"""Places: what one engine rank holds of each tensor that a publication brings, and proofs over their bytes.

Written for sglang 0.5.23.

Two namings of the same weights: Hugging Face tensors, of which a rank holds some rectangle somewhere in its fused
parameters (`layout`), and the rank's own parameters as they are (`local_layout`). Receiver and proofs see only
places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import nn

from slimx.layout.maps import Rect
from slimx.layout.number_formats import all_formats
from slimx.layout.parts import matrix
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cpu import seeds
from slimx.reshard.kernels.cuda import LONGEST, DevicePlan
from slimx.reshard.kernels.record import PIECE, rectangle

Parameters = Mapping[str, torch.Tensor]
BASE = "base_layer"
"""Attribute of a layer that SGLang has wrapped for adapters: the layer itself."""
CACHE_SCALES = ("k_scale", "v_scale")
"""Names of parameters that scale an fp8 KV cache."""


@dataclass(frozen=True, slots=True)
class Held:
    """Part of a tensor in a parameter: `local_*` of its rectangles count in the parameter's matrix, the rest in the
    tensor's.

    The parameter is found by name whenever it is looked at: SGLang puts others in place when it packs weights.
    """

    parameter: str
    shape: tuple[int, ...]
    """Shape of the parameter."""
    rects: tuple[Rect, ...]
    """One, or several that follow each other by rows: a tensor of sections of which the rank has its share each."""

    def views(self, parameters: Parameters) -> list[torch.Tensor] | None:
        """The values [rows, cols] of each rectangle, without a copy; None if the parameter has got another form."""
        parameter = parameters.get(self.parameter)
        if parameter is None or tuple(parameter.shape) != self.shape or not parameter.data.is_contiguous():
            return None
        flat = parameter.data.view(matrix(self.shape))
        return [flat[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] for r in self.rects]


@dataclass(slots=True)
class Destination:
    """The places of one tensor of a publication on this rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    held: list[Held] = field(default_factory=list)
    """All hold the same part of the tensor: more than one for redundant experts, none for another rank's expert."""

    @property
    def form(self) -> str:
        """ "dtype:d0,d1", as inventories have it."""
        return f"{str(self.dtype).removeprefix('torch.')}:{','.join(map(str, self.shape))}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Layout:
    places: dict[str, Destination] = field(default_factory=dict)
    """Every tensor that this engine takes, those of which this rank holds nothing among them."""
    uncovered: dict[str, str] = field(default_factory=dict)
    """Held parameter that no tensor explains -> why."""
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that the model's `load_weights` takes only in one call with others -> those others."""

    @property
    def held(self) -> list[str]:
        """Names of tensors of which this rank holds something."""
        return [name for name, place in self.places.items() if place.held]


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by name, without what no checkpoint or trainer has: notes beside codes, and the
    scales of an fp8 KV cache, which SGLang gives to every attention of a model that has fp8 weights, whether or not its
    KV cache is fp8."""
    apart = {*CACHE_SCALES, *chain.from_iterable(each.IGNORED for each in all_formats().values())}
    return {name: held for name, held in model.named_parameters() if name.rpartition(".")[2] not in apart}


def restore_cache_scales(model: nn.Module) -> None:
    """Give the scales of an fp8 KV cache the values that they had before the server slept.

    Its memory comes back undefined, and no publication brings them. SGLang keeps each as a number beside the parameter,
    once it has processed what it loaded; before that -1 stands for a scale that no checkpoint had.
    """
    for module in model.modules():
        for name in CACHE_SCALES:
            if isinstance(scale := module._parameters.get(name), nn.Parameter):
                scale.data.fill_(getattr(module, f"{name}_float", None) or -1.0)


def local_layout(model: nn.Module) -> Layout:
    """The rank's parameters under their own names. One that is no contiguous memory is listed in `uncovered`."""
    layout = Layout()
    for name, held in weights_of(model).items():
        if not held.data.is_contiguous():
            layout.uncovered[name] = f"strides {held.stride()} are not those of contiguous memory"
            continue
        rows, cols = matrix(held.shape)
        shape = tuple(held.shape)
        layout.places[name] = Destination(held.dtype, shape, [Held(name, shape, (Rect(0, 0, 0, rows, cols, 0, 0),))])
    return layout


def staged_sums(
    views: Mapping[str, torch.Tensor], places: Mapping[str, Destination], device: torch.device | None = None
) -> dict[str, tuple[int, int]]:
    """For tensors as they travelled: (checksum of the whole, share of this rank), read in one pass.

    A share is what the rank's part adds to the tensor's checksum; it does not depend on where the bytes lie.
    `device`: the GPU that has them; None: they are in host memory.
    """
    records: list[tuple[int, ...]] = []
    for number, (name, view) in enumerate(views.items()):
        rows, cols = matrix(view.shape)
        flat, below = view.view(rows, cols), 0
        for own in places[name].held[0].rects:
            right = own.col + own.cols
            for row, col, height, width, index in (
                (own.row, own.col, own.rows, own.cols, 2 * number),
                # The rest of the tensor: above the rectangle, and beside it.
                (below, 0, own.row - below, cols, 2 * number + 1),
                (own.row, 0, own.rows, own.col, 2 * number + 1),
                (own.row, right, own.rows, cols - right, 2 * number + 1),
            ):
                records += _record(flat[row : row + height, col : col + width], row, col, cols, index)
            below = own.row + own.rows
        records += _record(flat[below:], below, 0, cols, 2 * number + 1)
    sums = _summed(records, 2 * len(views), device)
    whole = sums[0::2] + sums[1::2] + seeds([view.nbytes for view in views.values()])
    return {name: (int(whole[k]), int(sums[2 * k])) for k, name in enumerate(views)}


def held_sums(
    places: Mapping[str, Destination], names: Iterable[str], parameters: Parameters
) -> dict[str, set[int | None]]:
    """The shares of `names` in what the model holds now: one value where every copy of a tensor holds the same, None
    among them for a parameter that cannot be read as it was loaded."""
    out: dict[str, set[int | None]] = {}
    found: dict[torch.device | None, tuple[list[str], list[tuple[int, ...]]]] = {}
    """Device -> names of tensors, and the records of what lies there."""
    for name in names:
        place, out[name] = places[name], set()
        for held in place.held:
            if (views := held.views(parameters)) is None or views[0].dtype != place.dtype:
                out[name].add(None)
                continue
            tensors, records = found.setdefault(views[0].device if views[0].is_cuda else None, ([], []))
            for rect, view in zip(held.rects, views, strict=True):
                records += _record(view, rect.row, rect.col, matrix(place.shape)[1], len(tensors))
            tensors.append(name)
    for device, (tensors, records) in found.items():
        for name, share in zip(tensors, _summed(records, len(tensors), device).tolist(), strict=True):
            out[name].add(share)
    return out


def derive(model: nn.Module) -> None:
    """Do what SGLang does after loads that pass `load_weights` by: make MLA's w_kc and w_vc.

    `load_weights` does it by itself (model_loader.loader.post_load_weights); process_weights_after_loading runs in
    /end_weight_update for both. Norms that are centred on zero (GemmaRMSNorm) keep 1 + weight beside the weight, which
    their weight loader makes.
    """
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def differing(places: dict[str, Destination], known: dict[str, int], parameters: Parameters) -> list[str]:
    """Those of `known`, tensors with their shares, of which `parameters` hold something else."""
    sums = held_sums(places, known, parameters)
    return [name for name, share in known.items() if sums[name] != {share}]


def derived(model: nn.Module, published: Iterable[torch.Tensor]) -> Iterator[str]:
    """Tensors that hang on modules beside `published`, all parameters, their views and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *published)}
    for name, module in model.named_modules():
        if hasattr(module, BASE):  # where SGLang notes the places of its modules' outputs
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own:
                yield f"{name}.{attribute}" if name else attribute


def _record(part: torch.Tensor, row: int, col: int, pitch: int, index: int) -> list[tuple[int, ...]]:
    """The kernel's record of `part`, which stands at (row, col) of a tensor of `pitch` columns; none if it is empty."""
    if part.numel() == 0:
        return []
    if part.shape[1] == pitch and part.is_contiguous() and part.nbytes <= LONGEST:
        part = part.reshape(1, -1)  # one run of bytes: vectors, whole tensors, row slices
    size = part.element_size()
    place = {"pos": (row * pitch + col) * size, "pos_ld": max(pitch, part.shape[1]) * size}
    return [rectangle(part, tensor=index, **place, device=part.device.type)]


def _summed(records: list[tuple[int, ...]], count: int, device: torch.device | None) -> np.ndarray:
    return sum_rects(np.array(records, dtype=PIECE), count, device)


def sum_rects(pieces: np.ndarray, count: int, device: torch.device | None) -> np.ndarray:
    """The shares that `pieces` [n] of `PIECE` add to the checksums [count] uint64 of their tensors, without seeds.

    `device`: where their sources are, None for host memory. Waits for the device's current stream, so that what was
    queued on it before is seen.
    """
    sums = np.zeros(count, dtype=np.uint64)
    if device is None:
        kernel.checksum_rects(pieces, sums)
        return sums
    if not len(pieces):
        return sums
    names = [f"tensor {number}" for number in range(count)]
    plan = DevicePlan(pieces, bucket_bytes=0, names=names, bucket="of checksums", device=device, checksum=True)
    on_device = torch.zeros(count, dtype=torch.int64, device=device)
    kernel_cuda.checksum_rects(plan, on_device)
    return kernel_cuda.results(plan, on_device)
