"""Maps Hugging Face tensors to this rank's part of a loaded SGLang model: one row per kind of parameter.

Written for sglang 0.5.23: engines with tensor, expert and DP-attention parallelism, fused shared experts, redundant
experts. SGLang fuses and splits tensors while loading. The inverse of the same map locates each tensor's bytes in the
rank's parameters for comparison with the publisher's. Sizes and ranks are read from the model's modules, not from the
tables with which publishers plan (`slimx.models`): two independent sources that must agree.
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
    """SGLang's ExpertLocationMetadata."""

    physical_to_logical_map_cpu: torch.Tensor
    """int [layers, slots]: the expert in each slot."""
    num_logical_experts: int
    num_physical_experts: int


@dataclass(frozen=True, slots=True)
class ServedPiece:
    """The part of one Hugging Face tensor in a parameter of this rank."""

    tensor: str | None
    """Name, with placeholders for the row's groups; None for padding."""
    shape: tuple[int, ...]
    """Shape of the complete tensor."""
    rects: tuple[Rect, ...]
    """Empty: other ranks hold the tensor. Several: as in `LocalPart`."""


@dataclass(frozen=True, slots=True)
class ServedParameter:
    """A parameter of this rank and the modules around it."""

    parameter: torch.Tensor
    owner: nn.Module
    parent: nn.Module
    experts: object
    """SGLang's ExpertLocationMetadata; None: physical experts are the model's."""

    @property
    def cols(self) -> int:
        return matrix(self.parameter.shape)[1]


def whole(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields a parameter stored as in the checkpoint, identical on every rank."""
    yield _piece("{name}", tuple(served.parameter.shape))


def vocabulary(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of the real vocabulary, then padding."""
    owner = cast(places.Vocabulary, served.owner)
    indices = owner.shard_indices
    rows, cols = served.parameter.shape
    start = indices.org_vocab_start_index
    real = indices.num_org_elements
    _expect(indices.num_added_elements == 0, "an added vocabulary is stored in the same parameter")
    yield ServedPiece("{name}", (owner.org_vocab_size, cols), (Rect(0, start, 0, real, cols, 0, 0),))
    yield ServedPiece(None, (), (Rect(0, 0, 0, rows - real, cols, real, 0),))


def rows_split(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's rows of a ColumnParallelLinear."""
    owner = cast(places.Linear, served.owner)
    yield share_of_rows("{name}", owner.output_size, served.cols, served.parameter.shape[0], rank_in(owner.tp_group), 0)


def columns_split(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields this rank's columns of a RowParallelLinear."""
    owner = cast(places.Linear, served.owner)
    rows, cols = served.parameter.shape
    yield _columns("{name}", (rows, cols), owner.input_size, rank_in(owner.tp_group), 0)


def qkv(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields rows of q, then k, then v; with more ranks than KV heads, several ranks hold the same ones."""
    start = 0
    for part, (total, shard, rank) in zip("qkv", _heads(served), strict=True):
        tensor = f"{{at}}.{part}_proj.{{kind}}"
        yield share_of_rows(tensor, total, served.cols, shard, rank, start, vector=served.parameter.dim() == 1)
        start += shard


def qkv_of_one(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields rows of q, then k, then v, like `qkv`, for checkpoints that stack query, key and value in one tensor."""
    rects: list[Rect] = []
    start = 0
    first = 0
    for total, shard, rank in _heads(served):
        rects.append(Rect(0, first + rank * shard, 0, shard, served.cols, start, 0))
        start += shard
        first += total
    yield ServedPiece("{name}", (first, served.cols), tuple(rects))


def _heads(served: ServedParameter) -> tuple[tuple[int, int, int], ...]:
    """Returns rows of the complete projection, rows of this rank's shard and its index, for query, key and value."""
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
    """Yields MLA's first projections, identical on every rank: rows of the query's, then of the key-value's."""
    query = cast(places.LatentLayer, served.parent).q_lora_rank
    yield share_of_rows("{at}.q_a_proj.weight", query, served.cols, query, 0, 0)
    rest = cast(places.Linear, served.owner).output_size - query
    yield share_of_rows("{at}.kv_a_proj_with_mqa.weight", rest, served.cols, rest, 0, query)


def gate_up(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields rows of gate, then up, of a dense MLP or a shared expert."""
    owner = cast(places.Linear, served.owner)
    start = 0
    for name, size, shard in zip(("gate", "up"), owner.output_sizes, owner.output_partition_sizes, strict=True):
        yield share_of_rows(f"{{at}}.{name}_proj.weight", size, served.cols, shard, rank_in(owner.tp_group), start)
        start += shard


def heads_norm(served: ServedParameter) -> Iterator[ServedPiece]:
    """Yields a norm of query or key: per head, identical on every rank, or (MiniMaxM2RMSNormTP) over all heads, where
    ranks hold the part that they compute."""
    if not hasattr(served.owner, "num_head_replicas"):
        yield from whole(served)
        return
    owner = cast(places.HeadsNorm, served.owner)
    shard = served.parameter.shape[0]
    total = shard * owner.attn_tp_size // owner.num_head_replicas
    yield share_of_rows("{name}", total, 1, shard, owner.attn_tp_rank // owner.num_head_replicas, 0, vector=True)


def experts_gate_up(
    served: ServedParameter, names: tuple[str, str] = ("gate_proj", "up_proj")
) -> Iterator[ServedPiece]:
    """Yields w13: per expert the rows of gate, then up (reversed if the method of FlashInfer's kernels says so).
    `names`: both names in the checkpoint."""
    owner = cast(places.Experts, served.owner)
    inner = owner.intermediate_size_per_partition
    method = getattr(owner, "weight_load_method", None) or owner.quant_method
    order: Sequence[str] = names
    if getattr(method, "load_up_proj_weight_first", False):
        order = names[::-1]
    _expect(tuple(served.parameter.shape) == (owner.num_local_experts, 2 * inner, owner.hidden_size), _unlike(served))
    shape = (inner * owner.moe_tp_size, owner.hidden_size)
    for name, slot in _experts(served):
        for index, part in enumerate(order):
            tensor = f"{name}.{part}.weight"
            if slot is None:
                yield ServedPiece(tensor, shape, ())
            else:
                yield share_of_rows(tensor, *shape, inner, owner.moe_tp_rank, (2 * slot + index) * inner)


def experts_down(served: ServedParameter, part: str = "down_proj") -> Iterator[ServedPiece]:
    """Yields w2: one matrix per expert, split by columns. `part`: its name in the checkpoint."""
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
    (r"(model\.embed_tokens|model\.word_embeddings|lm_head)\.weight", vocabulary),
    (ATTENTION + r"qkv_proj\.(?P<kind>weight|bias)", qkv),
    (ATTENTION + r"fused_qkv_a_proj_with_mqa\.weight", latent_down),
    (ATTENTION + r"(q_proj|q_b_proj|kv_b_proj)\.weight", rows_split),
    (ATTENTION + r"o_proj\.weight", columns_split),
    (ATTENTION + r"(kv_a_proj_with_mqa|q_a_layernorm|kv_a_layernorm)\.weight", whole),
    (ATTENTION + r"(q_norm|k_norm)\.weight", heads_norm),
    (FUSED + r"query_key_value\.weight", qkv_of_one),
    (FUSED + r"dense\.weight", columns_split),
    (FUSED + r"(query|key)_layernorm\.weight", whole),
    (r".+\.(input_layernorm|post_attention_layernorm)\.weight|model\.norm\.weight", whole),
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
"""Entry points of modules with ROWS for further kinds of layers."""

TOGETHER: tuple[Split, ...] = (latent_down,)
"""Rows whose tensors `load_weights` fuses only if one call includes all of them; otherwise it drops them silently."""


_BARE_ATTENTION = re.compile(r"(?<=\.layers\.)(\d+)\.(?=(qkv_proj|o_proj|q_norm|k_norm)\.)")
"""Attention that SGLang stores in the layer itself (Qwen3-Next and Qwen3.5) but checkpoints name self_attn."""


class Unexpected(Exception):
    """A parameter that does not match its row; recorded in `Layout.uncovered`."""


def hf_layout(model: nn.Module, experts: object = None) -> Layout:
    """Locates every Hugging Face tensor in `model`. Parameters that no row explains are listed in `uncovered`, never
    skipped.

    `experts`: SGLang's ExpertLocationMetadata of this process, which maps slots to experts.
    """
    layout = Layout()
    weights = weights_of(model)
    layers = {name: getattr(module, BASE, module) for name, module in model.named_modules()}
    for name, parameter in weights.items():
        owner = name.rpartition(".")[0]
        served = ServedParameter(parameter, layers[owner], layers[owner.rpartition(".")[0]], experts)
        try:
            _add(layout, name, served, weights)
        except (Unexpected, AttributeError, SlimxError) as error:
            layout.uncovered[name] = str(error)
    return layout


def _add(layout: Layout, name: str, served: ServedParameter, weights: Parameters) -> None:
    """Adds all pieces of one parameter after checking that they cover it exactly."""
    source = name
    scales_of = None
    for number_format in all_formats().values():
        codes = number_format.codes_of(name)
        if codes is not None and codes in weights:
            source = codes
            scales_of = number_format
            break
    published = _BARE_ATTENTION.sub(r"\1.self_attn.", source)
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
    """Records the location of the tensors of `pieces` in parameter `name`, after checking that they cover it
    exactly."""
    _expect(parameter.data.is_contiguous(), f"strides {parameter.stride()} are not those of contiguous memory")
    rects = chain.from_iterable(piece.rects for piece in pieces)
    boxes = [(rect.local_row, rect.local_col, rect.rows, rect.cols) for rect in rects]
    check_boxes(f"parameter {name}", matrix(parameter.shape), np.array(boxes, dtype=np.int64).reshape(-1, 4))
    for piece in pieces:
        if piece.tensor is None:
            continue
        destination = layout.places.setdefault(piece.tensor, Destination(parameter.dtype, piece.shape))
        if piece.rects:
            parts = {_part(other.rects) for other in destination.parts} | {_part(piece.rects)}
            _expect(len(parts) == 1, f"different parts of {piece.tensor} are stored")
            destination.parts.append(LocalPart(name, tuple(parameter.shape), piece.rects))


@functools.cache
def all_rows() -> tuple[tuple[str, Split], ...]:
    """Returns the rows of all kinds of layers."""
    return (*ROWS, *chain.from_iterable(kind.ROWS for kind in entry_points.load_all(GROUP).values()))


def row_of(name: str) -> tuple[Split, dict[str, str]]:
    """Returns the row that matches the parameter `name`, and the groups of its pattern."""
    for pattern, split in all_rows():
        match = re.fullmatch(pattern, name)
        if match:
            return split, match.groupdict()
    raise Unexpected(f"no row of slimx.adapters.sglang.weights.layout or of an entry point of {GROUP} matches it")


def _experts(served: ServedParameter) -> Iterator[tuple[str, int | None]]:
    """Yields (name of an expert, slot in this rank's parameter): slots in order, then experts of other ranks with
    None."""
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
    _expect(shared <= 1, f"{shared} shared experts are fused with the others, but SGLang loads at most one")
    if shared:
        yield "{mlp}.shared_experts", routed
    for expert in sorted(set(range(total)) - set(logical)):
        yield f"{{mlp}}.experts.{expert}", None


def _piece(tensor: str, shape: tuple[int, ...]) -> ServedPiece:
    rows, cols = matrix(shape)
    return ServedPiece(tensor, shape, (Rect(0, 0, 0, rows, cols, 0, 0),))


def share_of_rows(
    tensor: str, total: int, cols: int, shard: int, rank: int, start: int, vector: bool = False
) -> ServedPiece:
    """Returns rows from `rank * shard` on of a tensor of `total` rows, stored from row `start` of the parameter on."""
    shape = (total,) if vector else (total, cols)
    return ServedPiece(tensor, shape, (Rect(0, rank * shard, 0, shard, cols, start, 0),))


def _columns(tensor: str, local: tuple[int, int], total: int, rank: int, start: int) -> ServedPiece:
    """Returns columns from `rank * shard` on of a tensor of `total` columns, stored from row `start` of the parameter
    on."""
    rows, shard = local
    return ServedPiece(tensor, (rows, total), (Rect(0, 0, rank * shard, rows, shard, start, 0),))


def rank_in(group: places.ParallelGroup | None) -> int:
    """Returns the rank in the group that splits a layer, 0 for a layer that is not split."""
    return 0 if group is None else group.rank_in_group


def _part(rects: tuple[Rect, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the rectangles in the tensor, independent of where they are stored."""
    return tuple((rect.row, rect.col, rect.rows, rect.cols) for rect in rects)


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise Unexpected(problem)


def _unlike(served: ServedParameter) -> str:
    owner = cast(places.Experts, served.owner)
    return (
        f"shape {tuple(served.parameter.shape)} is not {owner.num_local_experts} experts of hidden size "
        f"{owner.hidden_size} and inner size {owner.intermediate_size_per_partition} (a repacked or split layout)"
    )
