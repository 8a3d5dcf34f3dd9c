"""Where a loaded SGLang model holds each Hugging Face tensor: one row per kind of parameter, sizes from the model.

Written for sglang 0.5.23 with one rank (tp 1, ep 1). SGLang fuses tensors while it loads them; the same map, read the
other way, finds the bytes of each Hugging Face tensor in what the model holds, so that they can be compared with the
publisher's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

Index = tuple[int | slice, ...]
Piece = tuple[str, Index]
"""Hugging Face name (with the row's groups still to fill in) and the index into the held parameter."""


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of one Hugging Face tensor: `parameter[index]`."""

    parameter: torch.Tensor
    index: Index
    shape: tuple[int, ...]

    def view(self) -> torch.Tensor:
        """The held values, without a copy."""
        return self.parameter.data[self.index]


@dataclass(frozen=True, slots=True)
class Layout:
    places: dict[str, Place] = field(default_factory=dict)
    """Hugging Face name -> place."""
    uncovered: dict[str, str] = field(default_factory=dict)
    """Held parameter that no row explains -> why."""


def whole(owner: nn.Module, held: torch.Tensor) -> Iterator[Piece]:
    """Held as it is in the checkpoint."""
    yield "{name}", ()


def vocabulary(owner: nn.Module, held: torch.Tensor) -> Iterator[Piece]:
    """Rows of the real vocabulary; SGLang may pad below them."""
    yield "{name}", (slice(0, owner.org_vocab_size),)


def qkv(owner: nn.Module, held: torch.Tensor) -> Iterator[Piece]:
    """Rows of q, then k, then v."""
    sizes = {"q_proj": owner.q_proj_shard_size, "k_proj": owner.kv_proj_shard_size, "v_proj": owner.v_proj_shard_size}
    _expect(held.shape[0] == sum(sizes.values()), f"{held.shape[0]} rows held, q, k and v have {sum(sizes.values())}")
    start = 0
    for part, rows in sizes.items():
        yield "{at}." + part + ".{kind}", (slice(start, start + rows),)
        start += rows


def gate_up(owner: nn.Module, held: torch.Tensor) -> Iterator[Piece]:
    """Rows of gate, then up, of a dense MLP."""
    gate, up = owner.output_sizes
    _expect(held.shape[0] == gate + up, f"{held.shape[0]} rows held, gate and up have {gate + up}")
    yield "{at}.gate_proj.{kind}", (slice(0, gate),)
    yield "{at}.up_proj.{kind}", (slice(gate, gate + up),)


def experts_gate_up(owner: nn.Module, held: torch.Tensor) -> Iterator[Piece]:
    """w13: per expert the rows of gate, then up (FlashInfer's kernels want up first and say so on their method)."""
    inner = owner.intermediate_size_per_partition
    method = getattr(owner, "weight_load_method", None) or owner.quant_method
    first, second = (
        ("up_proj", "gate_proj") if getattr(method, "load_up_proj_weight_first", False) else ("gate_proj", "up_proj")
    )
    _expect(tuple(held.shape) == (owner.num_experts, 2 * inner, owner.hidden_size), _unlike(owner, held))
    for expert in range(owner.num_experts):
        yield f"{{at}}.{expert}.{first}.weight", (expert, slice(0, inner))
        yield f"{{at}}.{expert}.{second}.weight", (expert, slice(inner, 2 * inner))


def experts_down(owner: nn.Module, held: torch.Tensor) -> Iterator[Piece]:
    """w2: one matrix per expert."""
    _expect(
        tuple(held.shape) == (owner.num_experts, owner.hidden_size, owner.intermediate_size_per_partition),
        _unlike(owner, held),
    )
    for expert in range(owner.num_experts):
        yield f"{{at}}.{expert}.down_proj.weight", (expert,)


ROWS: tuple[tuple[str, Callable[[nn.Module, torch.Tensor], Iterator[Piece]]], ...] = (
    # held parameter                                                      -> Hugging Face tensors
    (r"(model\.embed_tokens|lm_head)\.weight", vocabulary),
    (r"(?P<at>.+\.self_attn)\.qkv_proj\.(?P<kind>weight|bias)", qkv),
    (r".+\.self_attn\.(o_proj|q_norm|k_norm)\.weight", whole),
    (r".+\.(input_layernorm|post_attention_layernorm)\.weight|model\.norm\.weight", whole),
    (r"(?P<at>.+\.mlp)\.gate_up_proj\.(?P<kind>weight)", gate_up),
    (r".+\.mlp\.(down_proj|gate)\.weight", whole),
    (r"(?P<at>.+\.mlp\.experts)\.w13_weight", experts_gate_up),
    (r"(?P<at>.+\.mlp\.experts)\.w2_weight", experts_down),
)


class _Unexpected(Exception):
    """A parameter that its row does not describe; ends up in `Layout.uncovered`."""


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Unexpected(otherwise)


def _unlike(owner: nn.Module, held: torch.Tensor) -> str:
    return (
        f"shape {tuple(held.shape)} is not {owner.num_experts} experts of hidden size {owner.hidden_size} and "
        f"inner size {owner.intermediate_size_per_partition} (a repacked or split layout)"
    )


def hf_layout(model: nn.Module) -> Layout:
    """Find every Hugging Face tensor in `model`. What no row explains is listed in `uncovered`, never skipped."""
    layout, owners = Layout(), dict(model.named_modules())
    for name, held in model.named_parameters():
        try:
            for hf_name, index in _pieces(name, owners[name.rpartition(".")[0]], held):
                _expect(hf_name not in layout.places, f"{hf_name} is already held elsewhere")
                layout.places[hf_name] = Place(held, index, tuple(held.data[index].shape))
        except (_Unexpected, AttributeError) as error:
            layout.uncovered[name] = str(error)
    return layout


def _pieces(name: str, owner: nn.Module, held: torch.Tensor) -> Iterator[Piece]:
    for pattern, split in ROWS:
        if found := re.fullmatch(pattern, name):
            for template, index in split(owner, held):
                yield template.format(name=name, **found.groupdict()), index
            return
    raise _Unexpected("no row of slimx.adapters.sglang_layout.ROWS names it")
