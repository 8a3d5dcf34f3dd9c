"""Families Qwen3-VL, without and with experts: the layers of Qwen3, and a tower with deepstack."""

from __future__ import annotations

from slimx.extras.vision.family import VisionFamily
from slimx.extras.vision.towers import qwen3_vl
from slimx.models.families import as_family, qwen3, qwen3_moe

DENSE = VisionFamily(
    "Qwen3VLForConditionalGeneration",
    text=as_family(qwen3),
    tower=qwen3_vl,
    module="transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel",
    sections=(24, 20, 20),
    interleaved=True,
)
MOE = VisionFamily(
    "Qwen3VLMoeForConditionalGeneration",
    text=as_family(qwen3_moe),
    tower=qwen3_vl,
    module="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel",
    sections=(24, 20, 20),
    interleaved=True,
    stack="transposed",
    fixed={"norm_topk_prob": True},
)
