"""Maps Hugging Face tensors to this rank's parameters in a loaded SGLang model, by a table with one row per kind of
parameter.

Written for sglang 0.5.23: engines with tensor, expert and DP-attention parallelism, fused shared experts and redundant
experts. SGLang fuses and splits tensors while loading. This map locates each tensor's bytes in the rank's parameters
again, so that they can be compared with the publisher's. Sizes and ranks are read from the model's modules, not from
the tables with which publishers plan (`slimx.models`), so each of the two sources checks the other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

from slimx import entry_points
from slimx.adapters.sglang.weights import places
from slimx.adapters.sglang.weights.places import BASE, Destination, Layout, LocalPart, Parameters, weights_of
from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.number_formats import all_formats
from slimx.layout.parts import check_boxes, matrix


class ExpertLocation(Protocol):
    """The part of SGLang's ExpertLocationMetadata that maps physical slots to experts."""

    physical_to_logical_map_cpu: torch.Tensor
    """Expert stored in each physical slot, int [layers, slots]."""
    num_logical_experts: int
    num_physical_experts: int


@dataclass(frozen=True, slots=True)
class ServedPiece:
    """The part of one Hugging Face tensor that a parameter of this rank stores."""

    tensor: str | None
    """Template of the Hugging Face tensor's name, in which `{name}` is the parameter's name and other fields are named
    groups of the table row's regular expression; None for padding."""
    shape: tuple[int, ...]
    """Shape of the complete tensor, before it is split over ranks."""
    rects: tuple[Rect, ...]
    """Rectangles of the tensor that this rank stores, as in `LocalPart.rects`; empty if only other ranks store it."""


@dataclass(frozen=True, slots=True)
class ServedParameter:
    """A parameter of this rank, the module that owns it, that module's parent, and the map from slots to experts."""

    parameter: torch.Tensor
    owner: nn.Module
    parent: nn.Module
    experts: object
    """SGLang's ExpertLocationMetadata (`ExpertLocation`); None if slot i contains expert i."""
    model: nn.Module

    @property
    def cols(self) -> int:
        return matrix(self.parameter.shape)[1]


def whole(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields a parameter that every rank stores completely, as in the checkpoint."""
    yield _piece("{name}", tuple(served.parameter.shape))


def vocabulary(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of the vocabulary (embedding or output layer), then the padding rows."""
    owner = cast(places.Vocabulary, served.owner)
    indices = owner.shard_indices
    rows, cols = served.parameter.shape
    start = indices.org_vocab_start_index
    real = indices.num_org_elements
    _expect(
        indices.num_added_elements == 0,
        "the parameter also stores rows of added tokens, which checkpoints lack",
    )
    yield ServedPiece("{name}", (owner.org_vocab_size, cols), (Rect(0, start, 0, real, cols, 0, 0),))
    yield ServedPiece(None, (), (Rect(0, 0, 0, rows - real, cols, real, 0),))


def rows_split(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows (outputs) of a ColumnParallelLinear."""
    owner = cast(places.Linear, served.owner)
    rows = served.parameter.shape[0]
    yield share_of_rows(served, "{name}", owner.output_size, rows, rank_in(owner.tp_group))


def columns_split(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's columns (inputs) of a RowParallelLinear."""
    owner = cast(places.Linear, served.owner)
    yield _columns("{name}", served.parameter.shape, owner.input_size, rank_in(owner.tp_group), 0)


def qkv(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of q_proj, then k_proj, then v_proj, as a fused QKV parameter stores them. With more
    ranks than KV heads, several ranks store the same key and value rows."""
    start = 0
    for part, (total, shard, rank) in zip("qkv", _heads(served), strict=True):
        tensor = f"{{at}}.{part}_proj.{{kind}}"
        yield share_of_rows(served, tensor, total, shard, rank, start)
        start += shard


def qkv_of_one(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields the same rows as `qkv`, for checkpoints that stack query, key and value in one tensor."""
    rects: list[Rect] = []
    start = 0
    first = 0
    for total, shard, rank in _heads(served):
        rects.append(Rect(0, first + rank * shard, 0, shard, served.cols, start, 0))
        start += shard
        first += total
    yield ServedPiece("{name}", (first, *served.parameter.shape[1:]), tuple(rects))


def _heads(served: ServedParameter) -> tuple[tuple[int, int, int], ...]:
    """Returns (rows of the complete projection, rows of this rank's shard, index of this shard) for query, key and
    value."""
    owner = cast(places.QkvLinear, served.owner)
    rank = rank_in(owner.tp_group)
    kv_rank = rank_in(owner.kv_tp_group) // owner.num_kv_head_replicas
    heads = owner.total_num_heads
    groups = owner.total_num_kv_heads
    return (
        (heads * owner.head_size, owner.q_proj_shard_size, rank),
        (groups * owner.head_size, owner.kv_proj_shard_size, kv_rank),
        (groups * owner.v_head_size, owner.v_proj_shard_size, kv_rank),
    )


def latent_down(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields MLA's fused down projection, complete on every rank: rows of q_a_proj, then of kv_a_proj_with_mqa."""
    query = cast(places.LatentLayer, served.parent).q_lora_rank
    yield share_of_rows(served, "{at}.q_a_proj.weight", query, query, 0)
    rest = cast(places.Linear, served.owner).output_size - query
    yield share_of_rows(served, "{at}.kv_a_proj_with_mqa.weight", rest, rest, 0, query)


def gate_up(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of gate_proj, then up_proj, of a dense MLP or a shared expert."""
    owner = cast(places.Linear, served.owner)
    start = 0
    for name, size, shard in zip(("gate", "up"), owner.output_sizes, owner.output_partition_sizes, strict=True):
        yield share_of_rows(served, f"{{at}}.{name}_proj.weight", size, shard, rank_in(owner.tp_group), start)
        start += shard


def heads_norm(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields the weight of a query or key norm. Every rank stores a per-head norm completely. A norm over all heads
    (MiniMaxM2RMSNormTP) is split: each rank stores the part for its heads."""
    if not hasattr(served.owner, "num_head_replicas"):
        yield from whole(served)
        return
    owner = cast(places.HeadsNorm, served.owner)
    shard = served.parameter.shape[0]
    total = shard * owner.attn_tp_size // owner.num_head_replicas
    yield share_of_rows(served, "{name}", total, shard, owner.attn_tp_rank // owner.num_head_replicas)


def experts_gate_up(
    served: ServedParameter, names: tuple[str, str] = ("gate_proj", "up_proj")
) -> Iterator[ServedPiece]:
    """Yields the fused expert parameter w13: for each expert, the rows of gate, then of up. The order is reversed if
    the layer's quantization method sets `load_up_proj_weight_first`, as for FlashInfer's kernels. `names`: names of the
    gate and up projections in the checkpoint."""
    owner = cast(places.Experts, served.owner)
    inner = owner.intermediate_size_per_partition
    _expect(tuple(served.parameter.shape) == (owner.num_local_experts, 2 * inner, owner.hidden_size), _unlike(served))
    shape = (inner * owner.moe_tp_size, owner.hidden_size)
    method = getattr(owner, "weight_load_method", None) or owner.quant_method
    order = names[::-1] if getattr(method, "load_up_proj_weight_first", False) else names
    for name, slot in _experts(served):
        for index, part in enumerate(order):
            tensor = f"{name}.{part}.weight"
            if slot is None:
                yield ServedPiece(tensor, shape, ())
            else:
                yield share_of_rows(served, tensor, shape[0], inner, owner.moe_tp_rank, (2 * slot + index) * inner)


def experts_down(served: ServedParameter, part: str = "down_proj") -> Iterator[ServedPiece]:
    """Yields the expert parameter w2: for each expert, this rank's columns of the down projection. `part`: name of the
    down projection in the checkpoint."""
    owner = cast(places.Experts, served.owner)
    inner = owner.intermediate_size_per_partition
    total = inner * owner.moe_tp_size
    _expect(tuple(served.parameter.shape) == (owner.num_local_experts, owner.hidden_size, inner), _unlike(served))
    for name, slot in _experts(served):
        tensor = f"{name}.{part}.weight"
        if slot is None:
            yield ServedPiece(tensor, (owner.hidden_size, total), ())
        else:
            yield _columns(tensor, (owner.hidden_size, inner), total, owner.moe_tp_rank, slot * owner.hidden_size)


Split = Callable[[ServedParameter], Iterator[ServedPiece]]
ATTENTION = r"(?P<at>.+\.self_attn)\."
MLP = r"(?P<at>.+\.mlp(\.shared_experts?)?)\."
FUSED = r".+\.attention\."
ROWS: tuple[tuple[str, Split], ...] = (
    # SGLang parameter                                                    -> Hugging Face tensors
    (r"(model\.(language_model\.)?(embed_tokens|word_embeddings)|lm_head)\.weight", vocabulary),
    (ATTENTION + r"qkv_proj\.(?P<kind>weight|bias)", qkv),
    (ATTENTION + r"fused_qkv_a_proj_with_mqa\.weight", latent_down),
    (ATTENTION + r"(q_proj|q_b_proj|kv_b_proj)\.weight", rows_split),
    (ATTENTION + r"o_proj\.weight", columns_split),
    (ATTENTION + r"(kv_a_proj_with_mqa|q_a_layernorm|kv_a_layernorm)\.weight", whole),
    (ATTENTION + r"(q_norm|k_norm)\.weight", heads_norm),
    (FUSED + r"query_key_value\.weight", qkv_of_one),
    (FUSED + r"dense\.weight", columns_split),
    (FUSED + r"(query|key)_layernorm\.weight", whole),
    (r".+\.(input_layernorm|post_attention_layernorm)\.weight|model\.(language_model\.)?norm\.weight", whole),
    (MLP + r"gate_up_proj\.weight", gate_up),
    (MLP + r"down_proj\.weight", columns_split),
    (r".+\.(mlp|block_sparse_moe)\.(gate\.weight|gate\.expert_bias|(gate\.)?e_score_correction_bias)", whole),
    (r".+\.mlp\.shared_expert_gate\.weight", whole),
    (r"(?P<mlp>.+\.mlp)\.experts\.w13_weight", experts_gate_up),
    (r"(?P<mlp>.+\.mlp)\.experts\.w2_weight", experts_down),
    (r"(?P<mlp>.+\.block_sparse_moe)\.experts\.w13_weight", partial(experts_gate_up, names=("w1", "w3"))),
    (r"(?P<mlp>.+\.block_sparse_moe)\.experts\.w2_weight", partial(experts_down, part="w2")),
)
GROUP = "slimx.engine_layers"
"""Entry point group of modules whose `ROWS` extend the parameter table to additional kinds of layers."""

TOGETHER: tuple[Split, ...] = (latent_down,)
"""Split functions of table rows whose Hugging Face tensors must be loaded together: SGLang's `load_weights` fuses the
tensors of such a row only if one call includes all of them, and otherwise drops them silently."""


class Unexpected(Exception):
    """Raised for a parameter that no table row describes; `hf_layout` records the message in `Layout.uncovered`."""


def hf_layout(model: nn.Module, experts: object = None) -> Layout:
    """Returns the locations of all Hugging Face tensors in `model`. A parameter that no table row describes is listed
    in `uncovered`, never skipped.

    `experts`: this process's ExpertLocationMetadata of SGLang, which maps physical slots to experts; None if slot i
    contains expert i.
    """
    layout = Layout()
    weights = weights_of(model)
    layers = {name: getattr(module, BASE, module) for name, module in model.named_modules()}
    for name, parameter in weights.items():
        owner = name.rpartition(".")[0]
        served = ServedParameter(parameter, layers[owner], layers[owner.rpartition(".")[0]], experts, model)
        try:
            _add(layout, model, name, served, weights)
        except (Unexpected, AttributeError, SlimxError) as error:
            layout.uncovered[name] = str(error)
    return layout


def _add(layout: Layout, model: nn.Module, name: str, served: ServedParameter, weights: Parameters) -> None:
    """Adds the tensors stored in parameter `name` of `model` to `layout`, after checking that they cover the parameter
    exactly. `weights`: all parameters of the model, to look up the quantized codes if `name` is a tensor of scales."""
    source = name
    scales_of = None
    for number_format in all_formats().values():
        codes = number_format.codes_of(name)
        if codes is not None and codes in weights:
            source = codes
            scales_of = number_format
            break
    published = source
    for kind in entry_points.load_all(GROUP).values():
        published = kind.published_name(model, published)
    split, groups = row_of(published)
    if scales_of is None:
        pieces = split(served)
    else:
        pieces = scales_of.scales(split(replace(served, parameter=weights[source])), served.owner)
    named: list[ServedPiece] = []
    for piece in pieces:
        tensor = piece.tensor
        if tensor is not None:
            tensor = tensor.format(name=published, **groups)
        named.append(replace(piece, tensor=tensor))
    place(layout, name, served.parameter, named)
    if split in TOGETHER:
        names = {piece.tensor for piece in named if piece.tensor is not None}
        for tensor in names:
            layout.together[tensor] = tuple(sorted(names - {tensor}))


def place(layout: Layout, name: str, parameter: torch.Tensor, pieces: list[ServedPiece]) -> None:
    """Records in `layout` where the parameter `name` stores the tensors of `pieces`. Raises SlimxError unless they
    cover it exactly, and Unexpected if it is not contiguous or the rank stores different parts of a tensor."""
    _expect(parameter.data.is_contiguous(), f"strides {parameter.stride()} are not those of a contiguous tensor")
    rects = chain.from_iterable(piece.rects for piece in pieces)
    boxes = [(rect.local_row, rect.local_col, rect.rows, rect.cols) for rect in rects]
    check_boxes(f"parameter {name}", matrix(parameter.shape), np.array(boxes, dtype=np.int64).reshape(-1, 4))
    for piece in pieces:
        if piece.tensor is None:
            continue
        destination = layout.places.setdefault(piece.tensor, Destination(parameter.dtype, piece.shape))
        if piece.rects:
            parts = {_part(other.rects) for other in destination.parts} | {_part(piece.rects)}
            _expect(
                len(parts) == 1,
                f"this rank stores {piece.tensor} several times, but not the same rows and columns each time",
            )
            destination.parts.append(LocalPart(name, tuple(parameter.shape), piece.rects))


@functools.cache
def all_rows() -> tuple[tuple[str, Split], ...]:
    """Returns the rows of the parameter table: those of all entry points of `GROUP`, which are more specific, and of
    this module."""
    return (*chain.from_iterable(kind.ROWS for kind in entry_points.load_all(GROUP).values()), *ROWS)


def row_of(name: str) -> tuple[Split, dict[str, str]]:
    """Returns the function of the first table row whose pattern matches the parameter `name`, and the values of the
    pattern's named groups. Raises Unexpected if no pattern matches."""
    for pattern, split in all_rows():
        match = re.fullmatch(pattern, name)
        if match:
            return split, match.groupdict()
    raise Unexpected(f"no row of slimx.adapters.sglang.weights.layout or of an entry point of {GROUP} matches its name")


def _experts(served: ServedParameter) -> Iterator[tuple[str, int | None]]:
    """Yields the checkpoint name of each expert and its slot in this rank's parameter, in the order of slots; then the
    experts that only other ranks store, with slot None."""
    owner = cast(places.Experts, served.owner)
    shared = owner.num_fused_shared_experts
    routed = owner.num_local_experts - shared
    first = owner.moe_ep_rank * routed
    logical = list(range(first, first + routed))
    total = routed * owner.moe_ep_size
    if served.experts is not None:
        location = cast(ExpertLocation, served.experts)
        logical = location.physical_to_logical_map_cpu[owner.layer_id, first : first + routed].tolist()
        total = location.num_logical_experts
    for slot, expert in enumerate(logical):
        yield f"{{mlp}}.experts.{expert}", slot
    _expect(shared <= 1, f"{shared} shared experts are fused with the routed ones, but SGLang loads at most one")
    if shared:
        yield "{mlp}.shared_experts", len(logical)
    for expert in sorted(set(range(total)) - set(logical)):
        yield f"{{mlp}}.experts.{expert}", None


def _piece(tensor: str, shape: tuple[int, ...]) -> ServedPiece:
    rows, cols = matrix(shape)
    return ServedPiece(tensor, shape, (Rect(0, 0, 0, rows, cols, 0, 0),))


def share_of_rows(
    served: ServedParameter, tensor: str, total: int, shard: int, rank: int, start: int = 0
) -> ServedPiece:
    """Returns the piece of `shard` rows, from row `rank * shard` on, of a tensor with `total` rows, which is a vector
    if the parameter is one. The parameter stores the piece from its row `start` on."""
    shape = (total, *served.parameter.shape[1:][-1:])
    return ServedPiece(tensor, shape, (Rect(0, rank * shard, 0, shard, served.cols, start, 0),))


def _columns(tensor: str, local: Sequence[int], total: int, rank: int, start: int) -> ServedPiece:
    """Returns piece number `rank` of a tensor whose `total` columns are split over ranks; the parameter stores the
    piece from its row `start` on. `local`: (rows, columns) of the piece."""
    rows, shard = local
    return ServedPiece(tensor, (rows, total), (Rect(0, 0, rank * shard, rows, shard, start, 0),))


def rank_in(group: places.ParallelGroup | None) -> int:
    """Returns this rank's index in `group`, the process group that splits a layer; 0 if no group splits it (None)."""
    return 0 if group is None else group.rank_in_group


def _part(rects: tuple[Rect, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each of `rects`, its position in the tensor and its size, to check that all copies of the tensor on
    this rank contain the same part of it."""
    return tuple((rect.row, rect.col, rect.rows, rect.cols) for rect in rects)


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise Unexpected(problem)


def _unlike(served: ServedParameter) -> str:
    owner = cast(places.Experts, served.owner)
    return (
        f"shape {tuple(served.parameter.shape)} is not that of {owner.num_local_experts} experts with hidden size "
        f"{owner.hidden_size} and inner size {owner.intermediate_size_per_partition} (a repacked or split layout)"
    )
