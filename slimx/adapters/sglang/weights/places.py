"""Locations of a publication's tensors in the parameters of one engine rank, and checksums over their bytes.

Written for sglang 0.5.23.

A publication names the weights in one of two ways: as Hugging Face tensors, of which a rank stores rectangles in its
fused parameters (`layout`), or as the rank's own parameters under their SGLang names (`local_layout`). The receiver and
the checksums use only locations, so they work for both.
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
"""Name of the attribute that contains the original layer in a layer that SGLang has wrapped for LoRA adapters."""
CACHE_SCALES = ("k_scale", "v_scale")
"""Last components of the names of parameters that contain the scales of an fp8 KV cache."""


# Type checkers see every attribute of a module as `Tensor | Module`; a cast to one of these protocols gives the real
# types.


class ParallelGroup(Protocol):
    """The part of SGLang's GroupCoordinator, a process group, that is read to locate weights."""

    rank_in_group: int


class Linear(Protocol):
    """Attributes of SGLang's ColumnParallelLinear, MergedColumnParallelLinear and RowParallelLinear that are read to
    locate their weights."""

    tp_group: ParallelGroup | None
    input_size: int
    output_size: int
    output_sizes: Sequence[int]
    output_partition_sizes: Sequence[int]


class QkvLinear(Protocol):
    """Attributes of SGLang's QKVParallelLinear that are read to locate its weights."""

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
    """A rank's part of the vocabulary, as SGLang's shard indices describe it."""

    org_vocab_start_index: int
    num_org_elements: int
    num_added_elements: int


class Vocabulary(Protocol):
    """Attributes of SGLang's VocabParallelEmbedding and ParallelLMHead that are read to locate their weights."""

    shard_indices: VocabularyShard
    org_vocab_size: int


class LatentLayer(Protocol):
    """Attributes of SGLang's MLA attention layer that are read to locate its weights."""

    q_lora_rank: int


class HeadsNorm(Protocol):
    """Attributes of SGLang's MiniMaxM2RMSNormTP that are read to locate its weights."""

    num_head_replicas: int
    attn_tp_size: int
    attn_tp_rank: int


class Experts(Protocol):
    """Attributes of SGLang's FusedMoE that are read to locate its weights."""

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
    """A layer of SGLang that stores a tensor derived from its weight."""

    def refresh_gemma_weight(self) -> None: ...


@runtime_checkable
class PostLoads(Protocol):
    """A model of SGLang that computes derived tensors from its weights after loading."""

    def post_load_weights(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a published tensor that one parameter of this rank stores. In each rectangle, the `local_*` fields
    are a position in the parameter, seen as a matrix; the other fields are a position in the tensor.

    The parameter is looked up by name at each use, because SGLang replaces parameter objects when it repacks weights.
    """

    parameter: str
    shape: tuple[int, ...]
    """Shape that the parameter had when the layout was computed."""
    rects: tuple[Rect, ...]
    """Rectangles that this rank stores: a single one, or several with increasing rows if the tensor consists of
    sections that are each split over ranks."""

    def views(self, parameters: Parameters) -> list[torch.Tensor] | None:
        """Returns a view [rows, cols] of each rectangle in the parameter. Returns None if the parameter no longer
        exists, is no longer contiguous or has changed its shape."""
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
    """The locations of one published tensor on this rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the complete tensor, before it is split over ranks."""
    parts: list[LocalPart] = field(default_factory=list)
    """Locations of this rank's copies of its part of the tensor, all with the same values: several if an expert is
    stored redundantly, none if only other ranks store the tensor."""

    @property
    def form(self) -> str:
        """Dtype and shape as a string, "dtype:d0,d1", as `RankReceiver.inventory` reports them."""
        return f"{str(self.dtype).removeprefix('torch.')}:{','.join(map(str, self.shape))}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Layout:
    places: dict[str, Destination] = field(default_factory=dict)
    """Name of each tensor that this engine receives -> its locations on this rank; includes tensors of which this rank
    stores nothing."""
    uncovered: dict[str, str] = field(default_factory=dict)
    """Parameter of this rank that no published tensor covers -> reason."""
    together: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a tensor -> names of the other tensors that must be passed to the model's `load_weights` in the same
    call. Tensors that can be loaded alone are not included."""

    @property
    def local(self) -> list[str]:
        """Names of the tensors of which this rank stores a part."""
        return [name for name, place in self.places.items() if place.parts]


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the model's parameters by name, except those that neither checkpoints nor trainers contain: metadata of
    quantized codes, and the scales of an fp8 KV cache. SGLang adds such scales to every attention layer of a model with
    fp8 weights, regardless of the KV cache's dtype."""
    ignored = set(CACHE_SCALES)
    for number_format in all_formats().values():
        ignored.update(number_format.IGNORED)
    return {name: weight for name, weight in model.named_parameters() if name.rpartition(".")[2] not in ignored}


def restore_cache_scales(model: nn.Module) -> None:
    """Restores the scales of an fp8 KV cache after the server has slept.

    Their memory has undefined contents after waking, and publications do not include them. Once SGLang has processed a
    load, it stores each scale as a Python float next to the parameter. Before that, the value is -1, which marks a
    scale that is missing from the checkpoint.
    """
    for module in model.modules():
        for name in CACHE_SCALES:
            scale = module._parameters.get(name)
            if isinstance(scale, nn.Parameter):
                scale.data.fill_(getattr(module, f"{name}_float", None) or -1.0)


def local_layout(model: nn.Module) -> Layout:
    """Returns the layout for encoding "local", in which every parameter of this rank is a separate tensor with its
    SGLang name. Parameters in non-contiguous memory are `uncovered`."""
    layout = Layout()
    for name, weight in weights_of(model).items():
        if not weight.data.is_contiguous():
            layout.uncovered[name] = f"strides {weight.stride()} are not those of a contiguous tensor"
            continue
        rows, cols = matrix(weight.shape)
        shape = tuple(weight.shape)
        part = LocalPart(name, shape, (Rect(0, 0, 0, rows, cols, 0, 0),))
        layout.places[name] = Destination(weight.dtype, shape, [part])
    return layout


def staged_sums(
    views: Mapping[str, torch.Tensor], places: Mapping[str, Destination], device: torch.device | None = None
) -> dict[str, tuple[int, int]]:
    """Returns, for each received tensor of `views`, its checksum and its checksum share, both computed in one pass over
    the bytes.

    The share is the amount that this rank's part of the tensor contributes to the checksum; it does not depend on where
    the bytes are stored. `places`: location of each tensor on this rank; `device`: GPU that stores `views`; None if
    they are in host memory.
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
                # The rest of the tensor down to the rectangle's last row: above, left and right of the rectangle.
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
    """Returns, for each tensor of `names`, the set of checksum shares of its copies in `parameters`, the current
    weights. The set has one element if all copies agree; None represents a copy whose shape or dtype has changed."""
    shares: dict[str, set[int | None]] = {}
    by_device: dict[torch.device | None, tuple[list[str], list[tuple[int, ...]]]] = {}
    """Device (None: the CPU) -> names of the tensors stored there, and the checksum kernel's input records for this
    rank's parts of them."""
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
    """Recomputes the tensors that SGLang derives from weights, such as MLA's w_kc and w_vc, after weights were copied
    without `load_weights`.

    `load_weights` does this itself (model_loader.loader.post_load_weights), and /end_weight_update runs
    process_weights_after_loading with either way of copying. Zero-centered norms (GemmaRMSNorm) also store 1 + weight,
    which the norm's weight loader normally computes.
    """
    for module in model.modules():
        if isinstance(module, Refreshes):
            module.refresh_gemma_weight()
    if isinstance(model, PostLoads):
        model.post_load_weights()


def differing(places: dict[str, Destination], known: dict[str, int], parameters: Parameters) -> list[str]:
    """Returns the names of the tensors whose checksum share in `parameters` differs from the expected one in `known`,
    or differs between their copies in `parameters`."""
    sums = local_sums(places, known, parameters)
    return [name for name, share in known.items() if sums[name] != {share}]


def derived(model: nn.Module, published: Iterable[torch.Tensor]) -> Iterator[str]:
    """Yields the names of the tensors that SGLang derived from weights: module attributes that share memory neither
    with parameters nor with `published` tensors. Registered buffers are not included."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *published)}
    for name, module in model.named_modules():
        if hasattr(module, BASE):  # the wrapper's only tensors are output offsets of the wrapped layer
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in storages:
                yield f"{name}.{attribute}" if name else attribute


def _record(part: torch.Tensor, row: int, col: int, pitch: int, index: int) -> list[tuple[int, ...]]:
    """Returns a list with the checksum kernel's record of `part`, or an empty list if `part` is empty. `row`, `col`:
    position of `part` in a tensor with `pitch` columns; `index`: index, in the kernel's result, of the sum to which
    `part` is added."""
    if part.numel() == 0:
        return []
    if part.shape[1] == pitch and part.is_contiguous() and part.nbytes <= LONGEST:
        part = part.reshape(1, -1)  # contiguous in the tensor: vectors, whole tensors and row slices
    size = part.element_size()
    position = (row * pitch + col) * size
    stride = max(pitch, part.shape[1]) * size
    return [rectangle(part, tensor=index, pos=position, pos_ld=stride, device=part.device.type)]


def _summed(records: list[tuple[int, ...]], count: int, device: torch.device | None) -> np.ndarray:
    return sum_rects(np.array(records, dtype=PIECE), count, device)


def sum_rects(pieces: np.ndarray, count: int, device: torch.device | None) -> np.ndarray:
    """Returns, for each of `count` tensors, the sum of the contributions of `pieces` to its checksum, uint64 [count].
    `pieces`: `PIECE` records [n]. Checksum seeds, which depend only on the tensors' sizes, are not included.

    `device`: GPU that stores the source bytes; None if they are in host memory. The computation runs in the GPU's
    current stream, and so sees the results of earlier operations there; the call returns when the computation is done.
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
