"""Common part of Qwen3.5 to 3.8 as published, dense or with experts: the language model of the family without vision
tower, and the tower of Qwen3-VL without deepstack."""

from __future__ import annotations

from dataclasses import replace

from slimx.extras.recurrent.families import delta_net, qwen3_5_text
from slimx.extras.vision.layer_kinds import DeltaNetsWithTower
from slimx.extras.vision.nesting import nested_table, stacked_experts, text_config
from slimx.extras.vision.towers import qwen3_vl as tower
from slimx.json_types import Json
from slimx.layout.table import Table
from slimx.models import decoder
from slimx.models.fields import HfConfig
from slimx.models.layer_kind import LayerKind

UNTRAINED = ("model.visual.*",)
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return delta_net.gpt_arguments(text_config(hf))


def mtp_layers(hf: HfConfig) -> int:
    """Returns the number of multi-token prediction layers that the checkpoint declares."""
    return decoder.mtp_layers(text_config(hf))


def layer_kind(hf: HfConfig) -> LayerKind:
    """Returns the kind of the decoder's layers, with the parameters of the vision tower."""
    return DeltaNetsWithTower(tower.rows(hf["vision_config"]))


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    for key in _TOKENS:
        hf.get(key)  # read and ignored, because the language model alone treats these tokens like any others
    problem = qwen3_5_text.unsupported(text_config(hf))
    if problem:
        return f"text_config.{problem}"
    vision = hf["vision_config"]
    if vision.get("deepstack_visual_indexes"):
        return f"vision_config.deepstack_visual_indexes {vision['deepstack_visual_indexes']}"
    return decoder.unsupported_field(hf, ("language_model_only", False))


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp` is ignored, because multi-token prediction layers are not trained."""
    text = text_config(hf)
    table = qwen3_5_text.weight_table(text)
    # Published checkpoints store the experts of the prediction layer separately or stacked.
    stacks = stacked_experts(table.frozen, table.experts)
    table = replace(table, frozen={**table.frozen, **stacks})
    return nested_table(table, tower.rows(hf["vision_config"]), stack_experts=True)


def engine_table(hf: HfConfig, architecture: str, *, fused_shared_experts: bool) -> Table:
    """Returns the table that maps checkpoint tensors to the parameters of SGLang 0.5.23's model
    (`sglang.srt.models.qwen3_5`). `architecture`: the model's architecture, for errors.

    Raises SlimxError if SGLang would build a different model from config.json `hf`."""
    table = qwen3_5_text.engine_table(text_config(hf), architecture, fused_shared_experts=fused_shared_experts)
    return nested_table(table, tower.engine_rows(hf["vision_config"]), stack_experts=True)
