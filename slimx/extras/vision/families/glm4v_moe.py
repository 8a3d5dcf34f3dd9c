"""Family GLM-4.5V and GLM-4.6V: the layers of GLM-4.5-Air, and a tower with a gated MLP as its projector."""

from __future__ import annotations

from typing import override

from slimx.extras.families import glm4_moe
from slimx.extras.vision.family import VisionFamily
from slimx.extras.vision.towers import glm4v
from slimx.models.families import as_family
from slimx.models.fields import HfConfig


class Glm4vFamily(VisionFamily):
    """Family whose multi-token prediction layers, if any, are copied to exports and not trained."""

    FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM = glm4_moe.FUSES_ON_GPUS_WITHOUT_EXPERT_PARALLELISM

    @override
    def mtp_layers(self, hf: HfConfig) -> int:
        return 0


MOE = Glm4vFamily(
    "Glm4vMoeForConditionalGeneration",
    text=as_family(glm4_moe),
    tower=glm4v,
    module="transformers.models.glm4v_moe.modeling_glm4v_moe:Glm4vMoeVisionModel",
    sections=(8, 12, 12),
    interleaved=False,
    fixed={"attention_bias": True, "use_qk_norm": False},
    tower_fixed={"hidden_act": "silu"},
    rotary_fraction=0.5,
)
