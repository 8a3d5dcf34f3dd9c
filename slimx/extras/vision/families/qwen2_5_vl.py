"""Family Qwen2.5-VL: the layers of Qwen2.5, and a tower with attention in windows. Published files of config.json have
the fields of the language model at the top level."""

from __future__ import annotations

from collections import ChainMap
from typing import Any, override

from slimx.errors import SlimxError
from slimx.extras.families import qwen2
from slimx.extras.vision.family import VisionFamily
from slimx.extras.vision.towers import qwen2_5_vl
from slimx.layout.table import Table
from slimx.models.families import as_family
from slimx.models.fields import HfConfig

_PATCH = 3 * 2 * 14 * 14
"""Number of values in a patch of the published models."""


class Qwen25Family(VisionFamily):
    """Family whose rotary embeddings may be of type mrope, another name of the unscaled ones."""

    @override
    def engine_table(self, hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
        vision = hf["vision_config"]
        elements = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        if elements != _PATCH:
            raise SlimxError(
                f"{self.ARCHITECTURE} with patches of {elements} values cannot be served, because SGLang 0.5.23 takes "
                f"patches of any size other than {_PATCH} for embeddings; train the model without engines "
                "(algorithm.name=sft)",
                code="model.served_field",
                about="vision_config.patch_size",
            )
        return super().engine_table(hf, fused_shared_experts=fused_shared_experts)

    @override
    def _text(self, hf: HfConfig) -> HfConfig:
        text: Any = super()._text(hf)
        unscaled = {key: _unscaled(text[key]) for key in ("rope_parameters", "rope_scaling") if text.get(key)}
        return ChainMap[str, Any](unscaled, text)


def _unscaled(fields: Any) -> HfConfig:
    names = {key: "default" for key in ("rope_type", "type") if fields.get(key) == "mrope"}
    return ChainMap[str, Any](names, fields)


DENSE = Qwen25Family(
    "Qwen2_5_VLForConditionalGeneration",
    text=as_family(qwen2),
    tower=qwen2_5_vl,
    module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
    sections=(16, 24, 24),
    interleaved=False,
    nested=False,
    tower_fixed={"hidden_act": "silu"},
)
