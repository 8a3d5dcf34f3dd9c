"""The location of a publication's tensors on one engine rank, and checksums over their bytes.

Written for sglang 0.5.23.

Two naming schemes of the same weights: Hugging Face tensors, of which a rank stores a rectangle in its fused parameters
(`layout`), and the rank's parameters under their SGLang names (`local_layout`). Receiver and checksums use locations
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

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
"""Attribute of a layer that SGLang wrapped for adapters: the original layer."""
CACHE_SCALES = ("k_scale", "v_scale")
"""Names of parameters that scale an fp8 KV cache."""


# torch types attributes of a module as `Tensor | Module`; a cast to one of these protocols gives the real types.


class ParallelGroup(Protocol):
    """A parallel group."""

    rank_in_group: int


class Linear(Protocol):
    """ColumnParallelLinear, MergedColumnParallelLinear and RowParallelLinear."""

    tp_group: ParallelGroup | None
    input_size: int
    output_size: int
    output_sizes: Sequence[int]
    output_partition_sizes: Sequence[int]


class QkvLinear(Protocol):
    """QKVParallelLinear."""

    tp_group: ParallelGroup | None
    kv_tp_group: ParallelGroup | None
    num_kv_head_replicas: int
    total_num_heads: int
    total_num_kv_heads: int
    head_size: int
    v_head_size: int
    q_proj_shard_size: int
    kv_proj_shard_size: int
    v_proj_shard_size: int


class VocabularyShard(Protocol):
    """Indices of a rank's part of the vocabulary."""

    org_vocab_start_index: int
    num_org_elements: int
    num_added_elements: int


class Vocabulary(Protocol):
    """VocabParallelEmbedding and ParallelLMHead."""

    shard_indices: VocabularyShard
    org_vocab_size: int


class LatentLayer(Protocol):
    """MLA's attention layer."""

    q_lora_rank: int


class HeadsNorm(Protocol):
    """MiniMaxM2RMSNormTP."""

    num_head_replicas: int
    attn_tp_size: int
    attn_tp_rank: int


class Experts(Protocol):
    """FusedMoE."""

    quant_method: object
    layer_id: int
    hidden_size: int
    intermediate_size_per_partition: int
    num_local_experts: int
    num_fused_shared_experts: int
    moe_tp_size: int
    moe_tp_rank: int
    moe_ep_size: int
    moe_ep_rank: int


@runtime_checkable
class Refreshes(Protocol):
    """A layer of SGLang that derives a tensor from its weight."""

    def refresh_gemma_weight(self) -> None: ...


@runtime_checkable
class PostLoads(Protocol):
    """A model of SGLang that derives tensors from its weights."""

    def post_load_weights(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Part of a tensor in a parameter. `local_*` of its rectangles are positions in the parameter's matrix, the others
    in the tensor's.

    The parameter is looked up by name each time: SGLang replaces parameters when it packs weights.
    """

    parameter: str
    shape: tuple[int, ...]
    """Shape of the parameter."""
    rects: tuple[Rect, ...]
    """One, or several with consecutive rows: a tensor of sections, each split over ranks."""

    def views(self, parameters: Parameters) -> list[torch.Tensor] | None:
        """Returns the values [rows, cols] of each rectangle, without a copy; None if the parameter has another shape
        now."""
        parameter = parameters.get(self.parameter)
        if parameter is None or tuple(parameter.shape) != self.shape or not parameter.data.is_contiguous():
            return None
        flat = parameter.data.view(matrix(self.shape))
        views: list[torch.Tensor] = []
        for rect in self.rects:
            rows = flat[rect.local_row : rect.local_row + rect.rows]
            views.append(rows[:, rect.local_col : rect.local_col + rect.cols])
        return views


@dataclass(slots=True)
class Destination:
    """The location of one tensor of a publication on this rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the complete tensor."""
    parts: list[LocalPart] = field(default_factory=list)
    """Copies of the same part of the tensor: several for redundant experts, none for another rank's expert."""

    @property
    def form(self) -> str:
        """Form in inventories: "dtype:d0,d1"."""
        return f"{str(self.dtype).removeprefix('torch.')}:{','.join(map(str, self.shape))}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Layout:
    places: dict[str, Destination] = field(default_factory=dict)
    """Every tensor that this engine receives, including those of which this rank stores nothing."""
    uncovered: dict[str, str] = field(default_factory=dict)
    """Parameter that no tensor explains -> reason."""
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that the model's `load_weights` accepts only in one call with others -> those others."""

    @property
    def local(self) -> list[str]:
        """Names of tensors of which this rank stores a part."""
        return [name for name, place in self.places.items() if place.parts]


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the model's parameters by name, except those that checkpoints and trainers lack: metadata of quantized
    codes, and the scales of an fp8 KV cache, which SGLang adds to every attention of a model with fp8 weights,
    regardless of the KV cache's type."""
    ignored = set(CACHE_SCALES)
    for number_format in all_formats().values():
        ignored.update(number_format.IGNORED)
    return {name: weight for name, weight in model.named_parameters() if name.rpartition(".")[2] not in ignored}


def restore_cache_scales(model: nn.Module) -> None:
    """Restores the scales of an fp8 KV cache after the server slept.

    Their memory returns undefined, and publications do not include them. SGLang stores each as a float next to the
    parameter once it has processed a load; before that, -1 stands for a scale that is missing in the checkpoint.
    """
    for module in model.modules():
        for name in CACHE_SCALES:
            scale = module._parameters.get(name)
            if isinstance(scale, nn.Parameter):
                scale.data.fill_(getattr(module, f"{name}_float", None) or -1.0)


def local_layout(model: nn.Module) -> Layout:
    """Returns the rank's parameters under their SGLang names. Parameters in non-contiguous memory are `uncovered`."""
    layout = Layout()
    for name, weight in weights_of(model).items():
        if not weight.data.is_contiguous():
            layout.uncovered[name] = f"strides {weight.stride()} are not those of contiguous memory"
            continue
        rows, cols = matrix(weight.shape)
        shape = tuple(weight.shape)
        part = LocalPart(name, shape, (Rect(0, 0, 0, rows, cols, 0, 0),))
        layout.places[name] = Destination(weight.dtype, shape, [part])
    return layout


def staged_sums(
    views: Mapping[str, torch.Tensor], places: Mapping[str, Destination], device: torch.device | None = None
) -> dict[str, tuple[int, int]]:
    """Returns (checksum of the complete tensor, share of this rank's part) of received tensors, in one pass.

    The share is the part's contribution to the tensor's checksum, independent of where its bytes are. `device`: GPU
    that holds them; None: host memory.
    """
    records: list[tuple[int, ...]] = []
    for index, (name, view) in enumerate(views.items()):
        rows, cols = matrix(view.shape)
        flat = view.view(rows, cols)
        local = 2 * index
        other = 2 * index + 1
        below = 0
        for rect in places[name].parts[0].rects:
            right = rect.col + rect.cols
            for row, col, height, width, target in (
                (rect.row, rect.col, rect.rows, rect.cols, local),
                # The rest of the tensor: above, left and right of the rectangle.
                (below, 0, rect.row - below, cols, other),
                (rect.row, 0, rect.rows, rect.col, other),
                (rect.row, right, rect.rows, cols - right, other),
            ):
                records += _record(flat[row : row + height, col : col + width], row, col, cols, target)
            below = rect.row + rect.rows
        records += _record(flat[below:], below, 0, cols, other)
    sums = _summed(records, 2 * len(views), device)
    shares = sums[0::2]
    totals = shares + sums[1::2] + seeds([view.nbytes for view in views.values()])
    return {name: (int(totals[index]), int(shares[index])) for index, name in enumerate(views)}


def local_sums(
    places: Mapping[str, Destination], names: Iterable[str], parameters: Parameters
) -> dict[str, set[int | None]]:
    """Returns, for each tensor of `names`, the checksum shares of its copies in the model's current weights: a single
    value if all copies agree, with None for a copy whose shape or dtype has changed."""
    shares: dict[str, set[int | None]] = {}
    by_device: dict[torch.device | None, tuple[list[str], list[tuple[int, ...]]]] = {}
    """Device -> names of tensors, and records of their parts."""
    for name in names:
        destination = places[name]
        shares[name] = set()
        for part in destination.parts:
            views = part.views(parameters)
            if views is None or views[0].dtype != destination.dtype:
                shares[name].add(None)
                continue
            tensors, records = by_device.setdefault(views[0].device if views[0].is_cuda else None, ([], []))
            for rect, view in zip(part.rects, views, strict=True):
                records += _record(view, rect.row, rect.col, matrix(destination.shape)[1], len(tensors))
            tensors.append(name)
    for device, (tensors, records) in by_device.items():
        for name, share in zip(tensors, _summed(records, len(tensors), device).tolist(), strict=True):
            shares[name].add(share)
    return shares


def derive(model: nn.Module) -> None:
    """Repeats SGLang's processing after loads that bypass `load_weights`: computes MLA's w_kc and w_vc.

    `load_weights` does this itself (model_loader.loader.post_load_weights); process_weights_after_loading runs in
    /end_weight_update for both. Zero-centered norms (GemmaRMSNorm) store 1 + weight next to the weight, computed by
    their weight loader.
    """
    for module in model.modules():
        if isinstance(module, Refreshes):
            module.refresh_gemma_weight()
    if isinstance(model, PostLoads):
        model.post_load_weights()


def differing(places: dict[str, Destination], known: dict[str, int], parameters: Parameters) -> list[str]:
    """Returns the names of tensors in `known` whose share in `parameters` differs."""
    sums = local_sums(places, known, parameters)
    return [name for name, share in known.items() if sums[name] != {share}]


def derived(model: nn.Module, published: Iterable[torch.Tensor]) -> Iterator[str]:
    """Yields the names of tensors on modules that are not `published`, parameters, their views or buffers."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *published)}
    for name, module in model.named_modules():
        if hasattr(module, BASE):  # SGLang stores output offsets of the wrapped modules there
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in storages:
                yield f"{name}.{attribute}" if name else attribute


def _record(part: torch.Tensor, row: int, col: int, pitch: int, index: int) -> list[tuple[int, ...]]:
    """Returns the kernel's record of `part` at (row, col) of a tensor with `pitch` columns; nothing if it is empty."""
    if part.numel() == 0:
        return []
    if part.shape[1] == pitch and part.is_contiguous() and part.nbytes <= LONGEST:
        part = part.reshape(1, -1)  # one run of bytes: vectors, whole tensors, row slices
    size = part.element_size()
    position = (row * pitch + col) * size
    stride = max(pitch, part.shape[1]) * size
    return [rectangle(part, tensor=index, pos=position, pos_ld=stride, device=part.device.type)]


def _summed(records: list[tuple[int, ...]], count: int, device: torch.device | None) -> np.ndarray:
    return sum_rects(np.array(records, dtype=PIECE), count, device)


def sum_rects(pieces: np.ndarray, count: int, device: torch.device | None) -> np.ndarray:
    """Returns the contributions of `pieces` [n] of `PIECE` to the checksums [count] uint64 of their tensors, without
    seeds.

    `device`: device of their sources, None for host memory. Synchronizes with the device's current stream: earlier work
    on it is visible.
    """
    sums = np.zeros(count, dtype=np.uint64)
    if device is None:
        kernel.checksum_rects(pieces, sums)
        return sums
    if not len(pieces):
        return sums
    names = [f"tensor {index}" for index in range(count)]
    plan = DevicePlan(pieces, bucket_bytes=0, names=names, bucket="of checksums", device=device, checksum=True)
    on_device = torch.zeros(count, dtype=torch.int64, device=device)
    kernel_cuda.checksum_rects(plan, on_device)
    return kernel_cuda.results(plan, on_device)
