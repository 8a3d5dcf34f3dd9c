"""Families Qwen3.5, 3.6 and 3.8 as published, without and with experts: gated delta nets, and the tower of Qwen3-VL
without deepstack."""

from __future__ import annotations

from dataclasses import replace

from slimx.extras.recurrent.families import qwen3_5, qwen3_5_moe
from slimx.extras.vision.family import VisionFamily
from slimx.extras.vision.layer_kinds import DeltaNetsWithTower
from slimx.extras.vision.nesting import stacked_experts
from slimx.extras.vision.towers import qwen3_vl
from slimx.layout.table import Table
from slimx.models.families import as_family
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import LayerKind


class Qwen35Family(VisionFamily):
    """Family with gated delta nets."""

    def layer_kind(self, hf: HfConfig) -> LayerKind:
        return DeltaNetsWithTower(rows=self.tower.rows(hf["vision_config"]))

    def weight_table(self, hf: HfConfig, mtp: int = 0) -> Table:
        table = super().weight_table(hf, mtp)
        # Published checkpoints store the experts of the prediction layer separately or stacked.
        return replace(table, frozen={**table.frozen, **stacked_experts(table.frozen, table.experts)})


DENSE = Qwen35Family(
    "Qwen3_5ForConditionalGeneration",
    text=as_family(qwen3_5),
    tower=qwen3_vl,
    module="transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5VisionModel",
    sections=(11, 11, 10),
    interleaved=True,
    tower_fixed={"deepstack_visual_indexes": []},
    rotary_fraction=0.25,
)
MOE = Qwen35Family(
    "Qwen3_5MoeForConditionalGeneration",
    text=as_family(qwen3_5_moe),
    tower=qwen3_vl,
    module="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel",
    sections=(11, 11, 10),
    interleaved=True,
    tower_fixed={"deepstack_visual_indexes": []},
    stack="stacked",
    rotary_fraction=0.25,
)
