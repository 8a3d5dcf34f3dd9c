"""By plain torch operations what each rank of an SGLang engine must hold of a tiny model: the oracle of engine layouts.

Nothing here reads the engine tables, their maps or a plan. Layouts are those measured on running servers of 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slimx.extras.families import deepseek_v3, glm4_moe, minimax_m2
from slimx.layout.ranks import EngineSizes
from slimx.layout.table import Table
from slimx.models.families import qwen3_moe
from tests.unit.layout.layout_stand import (
    DEEPSEEK,
    GLM,
    MINIMAX,
    MODELS,
    QWEN,
    Model,
    Tensors,
    covering,
    experts_of,
    swiglu,
)

Named = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Served:
    """A tiny model as an engine holds it."""

    name: str
    model: Model
    """Whose checkpoint it serves."""
    table: Table
    fused: bool = False
    """The shared expert stands behind the routed ones."""


_ONE_SHARED = DEEPSEEK | {"n_shared_experts": 1}
"""Engines fuse one shared expert only."""
SERVED = {
    served.name: served
    for served in (
        Served("qwen", MODELS["qwen"], qwen3_moe.engine_table(QWEN)),
        Served("deepseek", MODELS["deepseek-mtp"], deepseek_v3.engine_table(DEEPSEEK)),
        Served(
            "fused",
            Model(_ONE_SHARED, deepseek_v3.weight_table(_ONE_SHARED, 1), 1),
            deepseek_v3.engine_table(_ONE_SHARED, fused_shared_experts=True),
            fused=True,
        ),
        Served("glm", MODELS["glm"], glm4_moe.engine_table(GLM)),
        Served("glm-fused", MODELS["glm"], glm4_moe.engine_table(GLM, fused_shared_experts=True), fused=True),
        Served("minimax", MODELS["minimax"], minimax_m2.engine_table(MINIMAX)),
    )
}


def engine_sizes(served: Served) -> list[EngineSizes]:
    """Returns a covering array of what the model can be split into; 4 query groups also over 8 ranks, where no other
    size forbids it."""
    tensors = (1, 2, 4) if "n_shared_experts" in served.model.hf else (1, 2, 4, 8)

    def fits(tensor: int, expert: int, pipeline: int, attention: int, redundant: int) -> bool:
        split = tensor % expert == tensor % attention == (4 + redundant) % expert == 0 and 20 % (tensor // expert) == 0
        return split and tensor * pipeline <= 16

    return [
        EngineSizes(tensor=t, expert=e, pipeline=p, attention_data=a, redundant=r)
        for t, e, p, a, r in covering(2, [tensors, (1, 2, 4), (1, 2, 3), (1, 2, 4), (0, 2, 4)], fits)
    ]


def engine_rank(served: Served, whole: Tensors, sizes: EngineSizes, rank: int) -> Tensors:
    """Returns local name -> tensor of what `rank` holds, padding rows as zeros."""
    return dict(_Rank(served, whole, sizes, rank).tensors())


class _Rank:
    def __init__(self, served: Served, whole: Tensors, sizes: EngineSizes, rank: int):
        self.served, self.whole, self.sizes = served, whole, sizes
        self.hf = served.model.hf
        self.stage, self.tensor_rank = divmod(rank, sizes.tensor)
        self.heads = sizes.tensor // sizes.attention_data
        self.sharers = sizes.tensor // sizes.expert
        self.expert = self.tensor_rank // self.sharers

    def tensors(self) -> Named:
        layers, stages = self.hf["num_hidden_layers"], self.sizes.pipeline
        counts = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
        start = sum(counts[: self.stage])
        if self.stage == 0:
            yield "model.embed_tokens.weight", self._embedding()
        for layer in range(start, start + counts[self.stage]):
            prefix = f"model.layers.{layer}."
            yield from self._layer(prefix, prefix, layer >= self.hf.get("first_k_dense_replace", 0))
        if self.stage == stages - 1:
            yield "model.norm.weight", self.whole["model.norm.weight"]
            yield "lm_head.weight", self._output()

    def _embedding(self) -> torch.Tensor:
        return _padded(self.whole["model.embed_tokens.weight"]).chunk(self.heads)[self.tensor_rank % self.heads]

    def _output(self) -> torch.Tensor:
        """Splits over all tensor-parallel ranks, under DP-attention too."""
        return _padded(self.whole["lm_head.weight"]).chunk(self.sizes.tensor)[self.tensor_rank]

    def _layer(self, here: str, there: str, sparse: bool) -> Named:
        whole = self.whole
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{here}{norm}.weight", whole[f"{there}{norm}.weight"]
        attention = self._grouped if not self.served.model.latent else self._latent
        yield from attention(here + "self_attn.", there + "self_attn.")
        out = whole[there + "self_attn.o_proj.weight"]
        yield here + "self_attn.o_proj.weight", out.chunk(self.heads, 1)[self.tensor_rank % self.heads]
        if not sparse:
            yield from self._dense(here + "mlp.", there + "mlp")
            return
        if "num_local_experts" in self.hf:
            here, there = here + "block_sparse_moe.", there + "block_sparse_moe."
            yield here + "e_score_correction_bias", whole[there + "e_score_correction_bias"]
        else:
            here, there = here + "mlp.", there + "mlp."
        yield here + "gate.weight", whole[there + "gate.weight"]
        yield from self._experts(here + "experts.", there)
        if "n_routed_experts" in self.hf:
            yield here + "gate.e_score_correction_bias", whole[there + "gate.e_score_correction_bias"]
            if not self.served.fused:
                yield from self._dense(here + "shared_experts.", there + "shared_experts")

    def _grouped(self, here: str, there: str) -> Named:
        for leaf in ("weight", "bias") if self.hf.get("attention_bias") else ("weight",):
            out = [self._heads(self.whole[f"{there}{kind}_proj.{leaf}"]) for kind in "qkv"]
            yield f"{here}qkv_proj.{leaf}", torch.cat(out)
        for kind in "qk":
            norm = self.whole[f"{there}{kind}_norm.weight"]
            yield f"{here}{kind}_norm.weight", norm if len(norm) == self.hf["head_dim"] else self._heads(norm)

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's heads of a projection."""
        heads = tensor.unflatten(0, (-1, self.hf["head_dim"]))
        # Fewer key and value heads than ranks: neighbours hold the same one.
        heads = heads.repeat_interleave(max(1, self.heads // len(heads)), 0)
        return heads.chunk(self.heads)[self.tensor_rank % self.heads].flatten(0, 1)

    def _latent(self, here: str, there: str) -> Named:
        down = [self.whole[f"{there}{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        yield here + "fused_qkv_a_proj_with_mqa.weight", torch.cat(down)
        for kind in ("q", "kv"):
            yield f"{here}{kind}_a_layernorm.weight", self.whole[f"{there}{kind}_a_layernorm.weight"]
            up = self.whole[f"{there}{kind}_b_proj.weight"]
            yield f"{here}{kind}_b_proj.weight", up.chunk(self.heads)[self.tensor_rank % self.heads]

    def _dense(self, here: str, there: str) -> Named:
        """Splits over all tensor-parallel ranks, under DP-attention too."""
        gate_up, down = swiglu(self.whole, there, self.sizes.tensor, self.tensor_rank)
        yield here + "gate_up_proj.weight", gate_up
        yield here + "down_proj.weight", down

    def _experts(self, here: str, there: str) -> Named:
        experts = experts_of(self.hf)
        physical = [*range(experts), *(p % experts for p in range(self.sizes.redundant))]
        count = len(physical) // self.sizes.expert
        slots = [f"{there}experts.{e}" for e in physical[self.expert * count : (self.expert + 1) * count]]
        slots += [there + "shared_experts"] if self.served.fused else []
        both = [swiglu(self.whole, slot, self.sharers, self.tensor_rank % self.sharers) for slot in slots]
        for name, matrices in zip(("w13_weight", "w2_weight"), zip(*both, strict=True), strict=True):
            yield here + name, torch.stack(matrices)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pads to a multiple of 64 rows."""
    more: Any = tensor.new_zeros(-len(tensor) % 64, tensor.shape[1])
    return torch.cat([tensor, more])
