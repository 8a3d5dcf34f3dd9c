"""The method with which benchmarks/publish.py compares slimx: one gather, conversion and broadcast per tensor.

This is a trainer without a plan. Every parameter is gathered whole from its shards and split into Hugging Face tensors
by views, splits and concatenations of torch, and each of these is broadcast to the engine, which copies it into the
fused parameter. Nothing is verified.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from publish_model import MODEL, TRAINERS, Layer

HERE, THERE = "decoder.layers.0.", "model.layers.0."
RENAMED = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    HERE + "self_attention.linear_qkv.layer_norm_weight": THERE + "input_layernorm.weight",
    HERE + "self_attention.q_layernorm.weight": THERE + "self_attn.q_norm.weight",
    HERE + "self_attention.k_layernorm.weight": THERE + "self_attn.k_norm.weight",
    HERE + "self_attention.linear_proj.weight": THERE + "self_attn.o_proj.weight",
    HERE + "pre_mlp_layernorm.weight": THERE + "post_attention_layernorm.weight",
    HERE + "mlp.router.weight": THERE + "mlp.gate.weight",
}


def send(
    parameters: Mapping[str, torch.Tensor],
    layer: Layer,
    rank: int,
    trainers: dist.ProcessGroup,
    engine: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Runs a trainer rank's part; rank 0 broadcasts through `engine`. Returns rank 0's seconds by stage."""
    seconds = {"pack": 0.0, "transfer": 0.0}
    for name, parameter in parameters.items():
        began = time.perf_counter()
        shards = _gather(name, parameter, layer, trainers)
        tensors = list(_convert(name, shards, layer)) if rank == 0 else []
        seconds["pack"] += time.perf_counter() - began
        for _, tensor in tensors:
            began = time.perf_counter()
            dist.broadcast(tensor, 0, group=engine)
            seconds["transfer"] += time.perf_counter() - began
    return seconds


def receive(places: Mapping[str, torch.Tensor], layer: Layer, engine: dist.ProcessGroup) -> dict[str, float]:
    """Runs the engine's part: copies each received tensor to its place. Returns seconds by stage."""
    seconds = {"load": 0.0}
    for name in _order(layer):
        tensor = torch.empty_like(places[name])
        dist.broadcast(tensor, 0, group=engine)
        began = time.perf_counter()
        places[name].copy_(tensor)
        seconds["load"] += time.perf_counter() - began
    return seconds


def _order(layer: Layer) -> Iterator[str]:
    """Yields names in the order of `send`."""
    for part in layer.trained.parts_of(0):
        shape = torch.empty(part.shape, device="meta")
        yield from (name for name, _ in _convert(part.name, [shape] * _shards(part.name, layer), layer))


def _shards(name: str, layer: Layer) -> int:
    """Returns the number of trainer ranks with different parts of the parameter."""
    replicated = "norm" in name or ".router." in name or (layer.split == "expert" and ".experts." not in name)
    return 1 if replicated else TRAINERS


def _gather(name: str, parameter: torch.Tensor, layer: Layer, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Returns all shards of the parameter."""
    if _shards(name, layer) == 1:
        return [parameter]
    shards = [torch.empty_like(parameter) for _ in range(TRAINERS)]
    dist.all_gather(shards, parameter, group=group)
    return shards


def _convert(name: str, shards: list[torch.Tensor], layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the Hugging Face tensors of one parameter, contiguous."""
    if found := re.fullmatch(r".*\.linear_fc([12])\.weight(\d+)", name):
        kind, local = int(found[1]), int(found[2])
        if layer.split == "expert":
            per_rank = layer.experts // TRAINERS
            for rank, shard in enumerate(shards):
                yield from _expert(kind, rank * per_rank + local, [shard])
        else:
            yield from _expert(kind, local, shards)
    elif name.endswith("linear_qkv.weight"):
        yield from _qkv(torch.cat(shards) if len(shards) > 1 else shards[0])
    elif len(shards) == 1:
        yield RENAMED[name], shards[0]
    else:
        yield RENAMED[name], torch.cat(shards, dim=1 if name.endswith("linear_proj.weight") else 0)


def _expert(kind: int, expert: int, shards: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    at = f"{THERE}mlp.experts.{expert}."
    if kind == 2:
        yield at + "down_proj.weight", torch.cat(shards, dim=1) if len(shards) > 1 else shards[0]
        return
    halves = [shard.chunk(2) for shard in shards]
    for k, projection in enumerate(("gate_proj", "up_proj")):
        rows = [half[k] for half in halves]
        yield at + projection + ".weight", torch.cat(rows) if len(rows) > 1 else rows[0]


def _qkv(whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    groups, head = MODEL["num_key_value_heads"], MODEL["head_dim"]
    per_group = MODEL["num_attention_heads"] // groups
    heads = whole.view(groups, per_group + 2, head, -1).split([per_group, 1, 1], dim=1)
    for kind, rows in zip("qkv", heads, strict=True):
        yield f"{THERE}self_attn.{kind}_proj.weight", rows.reshape(-1, whole.shape[1])
