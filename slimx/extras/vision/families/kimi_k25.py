"""Family Kimi-K2.5: the layers of DeepSeek-V3, with experts published in INT4, and MoonViT-3D as its vision tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, override

from slimx.errors import SlimxError
from slimx.extras.families import deepseek_v3
from slimx.extras.vision.family import VisionFamily
from slimx.extras.vision.nesting import nested_table
from slimx.extras.vision.tower import Tower
from slimx.extras.vision.towers import kimi_k25
from slimx.layout.number_formats import all_formats
from slimx.layout.table import Row, Table
from slimx.models.decoder import quantized_otherwise, unsupported_field
from slimx.models.families import as_family
from slimx.models.fields import HfConfig

_INT4 = "compressed-tensors"
"""Name in config.json of the number format in which the published checkpoints store expert weights."""
_SERVED = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
"""Fields from which SGLang builds the tower, with the values that they have if vision_config lacks them, as published
files do: those have the prefix `vt_` in these names, which SGLang ignores."""

_ONLY = {
    "video_attn_type": "spatial_temporal",
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}
"""Fields of vision_config with the only values that SGLang supports."""
_TEXT = "language_model."
"""Prefix of the language model's parameters in checkpoints and in SGLang."""
_TOWER = ("vision_tower.", "mm_projector.")
"""Prefixes of the tower's parameters in SGLang."""


class KimiFamily(VisionFamily):
    """Family whose checkpoints store the language model under the prefix `language_model.`, as SGLang does."""

    @override
    def unsupported(self, hf: HfConfig) -> str | None:
        text = hf["text_config"]
        for prefix, fields in (("", hf), ("text_config.", text)):
            quantized = quantized_otherwise(fields, _INT4)
            if quantized:
                return prefix + quantized
        group = all_formats()[_INT4].GROUP
        for key in ("hidden_size", "moe_intermediate_size"):
            if text[key] % group:
                return f"text_config.{key} {text[key]}, not a multiple of {group}"
        return super().unsupported(hf) or _unsupported_tower(hf)

    @override
    def engine_table(self, hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
        vision = hf["vision_config"]
        for key, default in _SERVED.items():
            served, value = vision.get(key, default), vision[f"vt_{key}"]
            if served != value:
                raise SlimxError(
                    f"{self.ARCHITECTURE} with vision_config.vt_{key} {value} cannot be served, because SGLang 0.5.23 "
                    f"builds the tower with {key} {served}; set vision_config.{key} to {value}",
                    code="model.served_field",
                    about=f"vision_config.{key}",
                )
        table = super().engine_table(hf, fused_shared_experts=fused_shared_experts)
        rows = [row if row.name.startswith(_TOWER) else replace(row, name=_TEXT + row.name) for row in table.rows]
        return replace(table, rows=tuple(rows))

    @override
    def _with_tower(self, table: Table, rows: tuple[Row, ...]) -> Table:
        nested = nested_table(table, rows, nested=lambda name: _TEXT + name)
        # No checkpoint of this family is in block fp8.
        return replace(nested, rows=tuple(replace(row, quantized=False) for row in nested.rows))

    @override
    def _unsupported_text(self, text: HfConfig) -> str | None:
        return deepseek_v3.unsupported_model(text)

    @override
    def _vision(self, hf: HfConfig) -> HfConfig:
        vision = hf["vision_config"]
        return {
            "hidden_size": vision["vt_hidden_size"],
            "intermediate_size": vision["vt_intermediate_size"],
            "depth": vision["vt_num_hidden_layers"],
            "num_heads": vision["vt_num_attention_heads"],
            "patch_size": vision["patch_size"],
            "spatial_merge_size": vision["merge_kernel_size"][0],
            "out_hidden_size": hf["text_config"]["hidden_size"],
            "positions": (vision["init_pos_emb_height"], vision["init_pos_emb_width"]),
        }

    @override
    def _tower(self, hf: HfConfig) -> Tower:
        vision = hf["vision_config"]
        tower: dict[str, Any] = {key: vision[f"vt_{key}"] for key in _SERVED}
        tower |= {f"pos_emb_{axis}": vision[f"init_pos_emb_{axis}"] for axis in ("height", "width", "time")}
        tower |= {key: vision[key] for key in ("patch_size", "merge_kernel_size")}
        fields = {
            "vision_config": tower,
            "text_config": {"hidden_size": hf["text_config"]["hidden_size"]},
            "projection_hidden_size": vision["mm_hidden_size"],
        }
        return replace(super()._tower(hf), fields=fields)


def _unsupported_tower(hf: HfConfig) -> str | None:
    """Returns a description of the first setting of the vision tower that transformers and SGLang do not both
    support."""
    vision = hf["vision_config"]
    side, size = vision["init_pos_emb_height"], vision["vt_hidden_size"]
    across = [vision["merge_kernel_size"][0]] * 2
    heads = vision["vt_num_attention_heads"]
    if not isinstance(heads, int) or heads < 1 or size % (4 * heads):
        return f"vision_config.vt_num_attention_heads {heads}, by which {size} cannot be divided into heads of pairs,"
    only = (
        ("init_pos_emb_width", side),
        ("merge_kernel_size", across),
        ("mm_hidden_size", size),
        ("text_hidden_size", hf["text_config"]["hidden_size"]),
        *_ONLY.items(),
    )
    problem = unsupported_field(vision, *only)
    if problem:
        return f"vision_config.{problem}"
    # Published files lack the last two, which transformers reads instead of mm_hidden_size and the token's other name.
    return unsupported_field(
        hf,
        ("projection_hidden_size", size),
        ("image_token_id", hf["media_placeholder_token_id"]),
    )


MOE = KimiFamily(
    "KimiK25ForConditionalGeneration",
    text=as_family(deepseek_v3),
    tower=kimi_k25,
    module="slimx.extras.vision.moonvit:KimiTower",
)
