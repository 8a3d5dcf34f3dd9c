"""The model that benchmarks/publish.py publishes, in the trainer's layout and in the engine's."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import torch

from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.parts import Part
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import Table, checkpoint_parts
from slimx.models.families.qwen3_moe import engine_table, weight_table
from slimx.reshard.manifest import Encoding
from slimx.reshard.plan.copy_plan import Plan, compile_plan

Split = Literal["tensor", "expert"]
MODEL = {
    "hidden_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 1,
    "vocab_size": 8192,
}
"""Qwen3-30B-A3B with one layer of 48 and a vocabulary of 8,192: 1.31 GB in bf16."""
SIZES: dict[Split, Sizes] = {"tensor": Sizes(tensor=2, expert_tensor=2), "expert": Sizes(data=2, expert=2)}
TRAINERS = 2


@dataclass(frozen=True, slots=True)
class Layer:
    """The model, on two trainer ranks and one engine rank."""

    split: Split
    """Parallelism by which the two trainers split the layer."""
    experts: int = MODEL["num_experts"]

    @property
    def hf(self) -> dict[str, int]:
        return MODEL | {"num_experts": self.experts}

    @property
    def table(self) -> Table:
        return weight_table(self.hf)

    @property
    def trained(self) -> MegatronLayout:
        return MegatronLayout(self.table, SIZES[self.split])

    @property
    def served(self) -> EngineLayout:
        return EngineLayout(engine_table(self.hf), EngineSizes())

    def plan(self, encoding: Encoding, bucket_bytes: int) -> Plan:
        """Returns the plan from two trainer ranks to one engine rank."""
        return compile_plan(
            self.trained.parts(),
            self.served.parts() if encoding == "local" else checkpoint_parts(self.table),
            precision=Precision("bfloat16", "bfloat16"),
            bucket_bytes=bucket_bytes,
        )

    def parameters_of(self, rank: int) -> dict[str, torch.Tensor]:
        """Returns a trainer rank's random parameters. Parts that several ranks have are equal."""
        out = {}
        for part in self.trained.parts_of(rank):
            seed = zlib.crc32(repr((part.name, part.sources, part.rects)).encode())
            out[part.name] = torch.empty(part.shape, dtype=torch.bfloat16).uniform_(
                -1, 1, generator=torch.Generator().manual_seed(seed)
            )
        return out

    def engine_parameters(self) -> dict[str, torch.Tensor]:
        """Returns the engine's fused parameters, all zero."""
        return {part.name: torch.zeros(part.shape, dtype=torch.bfloat16) for part in self.served.parts()}

    def hf_places(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns for each Hugging Face tensor its place in the fused parameters: contiguous rows of one of them."""
        places, shapes = {}, self.table.checkpoint_shapes()
        for part in self.served.parts():
            for name, view in _places(part, parameters[part.name]):
                places[name] = view.view(shapes[name])
        return {name: places[name] for name in shapes}


def _places(part: Part, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    rows = parameter if parameter.dim() == 1 else parameter.view(-1, parameter.shape[-1])
    return [(part.sources[r.source], rows[r.local_row : r.local_row + r.rows]) for r in part.rects]
