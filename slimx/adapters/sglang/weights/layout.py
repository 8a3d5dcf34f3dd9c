"""The places of Hugging Face tensors in this rank of a loaded SGLang model: one row per kind of parameter.

Written for sglang 0.5.23: tensor, expert and DP-attention parallel engines, fused shared experts, redundant experts.
SGLang fuses and splits tensors while it loads them. The same map, read the other way, finds each tensor's bytes in what
the rank holds, so that they can be compared with the publisher's. Sizes and ranks are read from the model's own
modules, not from the tables that publishers plan with (`slimx.models`): two accounts of one fact that must agree.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from slimx import entry_points
from slimx.adapters.sglang.weights.places import BASE, Destination, Held, Layout, Parameters, weights_of
from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.number_formats import all_formats
from slimx.layout.parts import check_boxes, matrix


@dataclass(frozen=True, slots=True)
class ServedPiece:
    """The part of one Hugging Face tensor that is in the held parameter."""

    tensor: str | None
    """Name, with the row's groups still to fill in; None for padding."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    rects: tuple[Rect, ...]
    """None at all: other ranks hold the tensor. Several: as of `Held`."""


@dataclass(frozen=True, slots=True)
class ServedParameter:
    """A held parameter and the modules around it."""

    held: torch.Tensor
    owner: nn.Module
    parent: nn.Module
    experts: Any
    """SGLang's ExpertLocationMetadata; None without it: physical experts are then the model's."""

    @property
    def cols(self) -> int:
        return matrix(self.held.shape)[1]


def whole(at: ServedParameter) -> Iterator[ServedPiece]:
    """Held as it is in the checkpoint, the same on every rank."""
    yield _piece("{name}", tuple(at.held.shape))


def vocabulary(at: ServedParameter) -> Iterator[ServedPiece]:
    """This rank's rows of the real vocabulary, then padding."""
    indices, (rows, cols) = at.owner.shard_indices, at.held.shape
    start, real = indices.org_vocab_start_index, indices.num_org_elements
    _expect(indices.num_added_elements == 0, "an added vocabulary is held in the same parameter")
    yield ServedPiece("{name}", (at.owner.org_vocab_size, cols), (Rect(0, start, 0, real, cols, 0, 0),))
    yield ServedPiece(None, (), (Rect(0, 0, 0, rows - real, cols, real, 0),))


def rows_split(at: ServedParameter) -> Iterator[ServedPiece]:
    """ColumnParallelLinear: this rank's rows."""
    yield share_of_rows("{name}", at.owner.output_size, at.cols, at.held.shape[0], rank_in(at.owner.tp_group), 0)


def columns_split(at: ServedParameter) -> Iterator[ServedPiece]:
    """RowParallelLinear: this rank's columns."""
    yield _columns("{name}", tuple(at.held.shape), at.owner.input_size, rank_in(at.owner.tp_group), 0)


def qkv(at: ServedParameter) -> Iterator[ServedPiece]:
    """Rows of q, then k, then v; with more ranks than KV heads, several hold the same."""
    start = 0
    for part, (total, shard, rank) in zip("qkv", _heads(at), strict=True):
        tensor = f"{{at}}.{part}_proj.{{kind}}"
        yield share_of_rows(tensor, total, at.cols, shard, rank, start, vector=at.held.dim() == 1)
        start += shard


def qkv_of_one(at: ServedParameter) -> Iterator[ServedPiece]:
    """The same where the checkpoint has query, key and value one below the other in one tensor."""
    rects, start, first = [], 0, 0
    for total, shard, rank in _heads(at):
        rects.append(Rect(0, first + rank * shard, 0, shard, at.cols, start, 0))
        start, first = start + shard, first + total
    yield ServedPiece("{name}", (first, at.cols), tuple(rects))


def _heads(at: ServedParameter) -> tuple[tuple[int, int, int], ...]:
    """Rows of the whole projection, rows of this rank's share and the share's number, for query, key and value."""
    owner = at.owner
    rank, kv_rank = rank_in(owner.tp_group), rank_in(owner.kv_tp_group) // owner.num_kv_head_replicas
    heads, groups = owner.total_num_heads, owner.total_num_kv_heads
    return (
        (heads * owner.head_size, owner.q_proj_shard_size, rank),
        (groups * owner.head_size, owner.kv_proj_shard_size, kv_rank),
        (groups * owner.v_head_size, owner.v_proj_shard_size, kv_rank),
    )


def latent_down(at: ServedParameter) -> Iterator[ServedPiece]:
    """MLA's first projections on every rank: rows of the query's, then of the key-value's."""
    query = at.parent.q_lora_rank
    yield share_of_rows("{at}.q_a_proj.weight", query, at.cols, query, 0, 0)
    rest = at.owner.output_size - query
    yield share_of_rows("{at}.kv_a_proj_with_mqa.weight", rest, at.cols, rest, 0, query)


def gate_up(at: ServedParameter) -> Iterator[ServedPiece]:
    """Rows of gate, then up, of a dense MLP or a shared expert."""
    start = 0
    for name, size, shard in zip(("gate", "up"), at.owner.output_sizes, at.owner.output_partition_sizes, strict=True):
        yield share_of_rows(f"{{at}}.{name}_proj.weight", size, at.cols, shard, rank_in(at.owner.tp_group), start)
        start += shard


def heads_norm(at: ServedParameter) -> Iterator[ServedPiece]:
    """A norm of query or key: of each head, the same on every rank, or (MiniMaxM2RMSNormTP) of all heads together, of
    which ranks hold those that they compute."""
    owner = at.owner
    if not hasattr(owner, "num_head_replicas"):
        yield from whole(at)
        return
    shard = at.held.shape[0]
    total = shard * owner.attn_tp_size // owner.num_head_replicas
    yield share_of_rows("{name}", total, 1, shard, owner.attn_tp_rank // owner.num_head_replicas, 0, vector=True)


def experts_gate_up(at: ServedParameter, names: tuple[str, str] = ("gate_proj", "up_proj")) -> Iterator[ServedPiece]:
    """w13: per expert the rows of gate, then up (FlashInfer's kernels want up first and say so on their method).
    `names`: the checkpoint's for both."""
    owner, inner = at.owner, at.owner.intermediate_size_per_partition
    method = getattr(owner, "weight_load_method", None) or owner.quant_method
    order = names[::-1] if getattr(method, "load_up_proj_weight_first", False) else names
    _expect(tuple(at.held.shape) == (owner.num_local_experts, 2 * inner, owner.hidden_size), _unlike(at))
    shape = (inner * owner.moe_tp_size, owner.hidden_size)
    for name, slot in _experts(at):
        for number, part in enumerate(order):
            start = None if slot is None else (2 * slot + number) * inner
            tensor = f"{name}.{part}.weight"
            if start is None:
                yield ServedPiece(tensor, shape, ())
            else:
                yield share_of_rows(tensor, *shape, inner, owner.moe_tp_rank, start)


def experts_down(at: ServedParameter, part: str = "down_proj") -> Iterator[ServedPiece]:
    """w2: one matrix per expert, split by columns; `part`: its name in the checkpoint."""
    owner, inner = at.owner, at.owner.intermediate_size_per_partition
    _expect(tuple(at.held.shape) == (owner.num_local_experts, owner.hidden_size, inner), _unlike(at))
    for name, slot in _experts(at):
        tensor, total = f"{name}.{part}.weight", inner * owner.moe_tp_size
        if slot is None:
            yield ServedPiece(tensor, (owner.hidden_size, total), ())
        else:
            yield _columns(tensor, (owner.hidden_size, inner), total, owner.moe_tp_rank, slot * owner.hidden_size)


Split = Callable[[ServedParameter], Iterator[ServedPiece]]
ATTENTION, MLP = r"(?P<at>.+\.self_attn)\.", r"(?P<at>.+\.mlp(\.shared_experts?)?)\."
FUSED = r".+\.attention\."
ROWS: tuple[tuple[str, Split], ...] = (
    # held parameter                                                      -> Hugging Face tensors
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
"""Entry points of modules with ROWS of further kinds of layers."""

TOGETHER: tuple[Split, ...] = (latent_down,)
"""Rows whose tensors `load_weights` fuses only if one call brings them all; alone it drops each without a word."""


_BARE_ATTENTION = re.compile(r"(?<=\.layers\.)(\d+)\.(?=(qkv_proj|o_proj|q_norm|k_norm)\.)")
"""Attention that SGLang holds in the layer itself (Qwen3-Next's and Qwen3.5's), where checkpoints name it self_attn."""


class Unexpected(Exception):
    """A parameter that its row does not describe; ends up in `Layout.uncovered`."""


def hf_layout(model: nn.Module, experts: Any = None) -> Layout:
    """Find every Hugging Face tensor in `model`. What no row explains is listed in `uncovered`, never skipped.

    `experts`: SGLang's ExpertLocationMetadata of this process, which says which experts the slots hold.
    """
    layout, weights = Layout(), weights_of(model)
    modules = {name: getattr(module, BASE, module) for name, module in model.named_modules()}
    for name, held in weights.items():
        owner = name.rpartition(".")[0]
        at = ServedParameter(held, modules[owner], modules[owner.rpartition(".")[0]], experts)
        try:
            _add(layout, name, at, weights)
        except (Unexpected, AttributeError, SlimxError) as error:
            layout.uncovered[name] = str(error)
    return layout


def _add(layout: Layout, name: str, at: ServedParameter, weights: Parameters) -> None:
    """Add all pieces of one of the parameters `weights`, once they are proven to cover it exactly."""
    kept = next((each for each in all_formats().values() if each.codes_of(name) in weights), None)
    source = name if kept is None else kept.codes_of(name)
    published = _BARE_ATTENTION.sub(r"\1.self_attn.", source)
    split, groups = row_of(published)
    pieces = split(at) if kept is None else kept.scales(split(replace(at, held=weights[source])), at.owner)
    named = [replace(p, tensor=p.tensor and p.tensor.format(name=published, **groups)) for p in pieces]
    place(layout, name, at.held, named)
    if split in TOGETHER:
        names = [piece.tensor for piece in named if piece.tensor is not None]
        layout.together.update({one: tuple(other for other in names if other != one) for one in names})


def place(layout: Layout, name: str, held: torch.Tensor, pieces: list[ServedPiece]) -> None:
    """Note where the tensors of `pieces` are in the parameter `name`, once they are proven to cover it exactly."""
    _expect(held.data.is_contiguous(), f"strides {held.stride()} are not those of contiguous memory")
    boxes = [(r.local_row, r.local_col, r.rows, r.cols) for piece in pieces for r in piece.rects]
    check_boxes(f"parameter {name}", matrix(held.shape), np.array(boxes, dtype=np.int64).reshape(-1, 4))
    for piece in pieces:
        if piece.tensor is None:
            continue
        found = layout.places.setdefault(piece.tensor, Destination(held.dtype, piece.shape))
        if piece.rects:
            parts = {_part(other.rects) for other in found.held} | {_part(piece.rects)}
            _expect(len(parts) == 1, f"{piece.tensor} is held in different parts")
            found.held.append(Held(name, tuple(held.shape), piece.rects))


@functools.cache
def all_rows() -> tuple[tuple[str, Split], ...]:
    """The rows of all kinds of layers."""
    return (*ROWS, *chain.from_iterable(kind.ROWS for kind in entry_points.load_all(GROUP).values()))


def row_of(name: str) -> tuple[Split, dict[str, str]]:
    """The row that describes the parameter `name`, and the groups of its pattern."""
    for pattern, split in all_rows():
        if found := re.fullmatch(pattern, name):
            return split, found.groupdict()
    raise Unexpected(f"no row of slimx.adapters.sglang.weights.layout or of an entry point of {GROUP} names it")


def _experts(at: ServedParameter) -> Iterator[tuple[str, int | None]]:
    """(name of an expert, slot in this rank's parameter or None): the slots in order, then what other ranks hold."""
    owner, layer = at.owner, at.owner.layer_id
    shared = owner.num_fused_shared_experts
    routed = owner.num_local_experts - shared
    first = owner.moe_ep_rank * routed
    logical = list(range(first, first + routed))
    total = routed * owner.moe_ep_size
    if at.experts is not None:
        logical = at.experts.physical_to_logical_map_cpu[layer, first : first + routed].tolist()
        total = at.experts.num_logical_experts
    for slot, expert in enumerate(logical):
        yield f"{{mlp}}.experts.{expert}", slot
    _expect(shared <= 1, f"{shared} shared experts are fused with the others, SGLang loads at most one")
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
    """Rows `rank * shard` and on of a tensor of `total` rows, from row `start` of the parameter on."""
    shape = (total,) if vector else (total, cols)
    return ServedPiece(tensor, shape, (Rect(0, rank * shard, 0, shard, cols, start, 0),))


def _columns(tensor: str, held: tuple[int, ...], total: int, rank: int, start: int) -> ServedPiece:
    """Columns `rank * shard` and on of a tensor of `total` columns, from row `start` of the parameter on."""
    rows, shard = held
    return ServedPiece(tensor, (rows, total), (Rect(0, 0, rank * shard, rows, shard, start, 0),))


def rank_in(group: Any) -> int:
    """Rank in the group that splits a layer; a layer without one is not split."""
    return 0 if group is None else group.rank_in_group


def _part(rects: tuple[Rect, ...]) -> tuple[tuple[int, ...], ...]:
    """Place in the tensor, wherever it is held."""
    return tuple((r.row, r.col, r.rows, r.cols) for r in rects)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unexpected(otherwise)


def _unlike(at: ServedParameter) -> str:
    owner = at.owner
    return (
        f"shape {tuple(at.held.shape)} is not {owner.num_local_experts} experts of hidden size {owner.hidden_size} and "
        f"inner size {owner.intermediate_size_per_partition} (a repacked or split layout)"
    )
