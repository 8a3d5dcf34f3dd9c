"""Family Kimi-K2.5, text model only: a DeepSeek-V3 whose fields are in `text_config` and whose tensors have the prefix
`language_model.`, with experts published in INT4. Only the text model is trained; exports copy the vision tower and its
projector unchanged."""

from __future__ import annotations

from dataclasses import replace

from slimx.extras.families import deepseek_v3
from slimx.json_types import Json
from slimx.layout.number_formats import all_formats
from slimx.layout.table import Row, Table
from slimx.models.decoder import layer_kind as layer_kind
from slimx.models.decoder import quantized_otherwise, unsupported_field
from slimx.models.engine_rows import no_engine
from slimx.models.fields import HfConfig

ARCHITECTURE = "KimiK25ForConditionalGeneration"
_TEXT = "language_model."
_INT4 = "compressed-tensors"
"""Name in config.json of the number format in which the published checkpoints store expert weights."""


def transformer_config(hf: HfConfig) -> Json:
    """Returns the fields of megatron-core's MLATransformerConfig that define the model, except parallelism and
    dtype."""
    return deepseek_v3.transformer_config(hf["text_config"])


def gpt_arguments(hf: HfConfig) -> Json:
    """Returns the arguments of megatron-core's GPTModel other than the TransformerConfig and the layer spec."""
    return deepseek_v3.gpt_arguments(hf["text_config"])


def mtp_layers(hf: HfConfig) -> int:
    """Returns the number of multi-token prediction layers that the checkpoint declares."""
    return deepseek_v3.mtp_layers(hf["text_config"])


def unsupported(hf: HfConfig) -> str | None:
    """Returns a description of the first setting in config.json `hf` that slimx does not support; None if all are
    supported."""
    text = hf["text_config"]
    for prefix, fields in (("", hf), ("text_config.", text)):
        quantized = quantized_otherwise(fields, _INT4)
        if quantized:
            return prefix + quantized
    group = all_formats()[_INT4].GROUP
    for key in ("hidden_size", "moe_intermediate_size"):
        if text[key] % group:
            return f"text_config.{key} {text[key]}, not a multiple of {group}"
    problem = deepseek_v3.unsupported_model(text)
    if problem:
        return f"text_config.{problem}"
    return unsupported_field(hf, ("tie_word_embeddings", False))


def weight_table(hf: HfConfig, mtp: int = 0) -> Table:
    """Returns the trainer's weight table: for each of megatron-core's parameters, the checkpoint tensors that it
    contains. `mtp`: number of multi-token prediction layers to train. The vision tower, and any further prediction
    layers that the checkpoint declares, are copied unchanged to exports (`Table.frozen`)."""
    table = deepseek_v3.weight_table(hf["text_config"], mtp)
    return replace(
        table,
        rows=tuple(_of_text(row) for row in table.rows),
        aliases={_TEXT + name: _TEXT + original for name, original in table.aliases.items()},
        frozen={_TEXT + name: shape for name, shape in table.frozen.items()} | _vision(hf),
    )


def engine_table(hf: HfConfig, *, fused_shared_experts: bool = False) -> Table:
    """Raises SlimxError, because a publication must cover every parameter of an engine, and trainers lack those of the
    vision tower."""
    raise no_engine(ARCHITECTURE, "engines also load the vision tower, which trainers lack")


def _of_text(row: Row) -> Row:
    # No checkpoint of this family is in block fp8.
    return replace(row, sources=tuple((_TEXT + name, shape) for name, shape in row.sources), quantized=False)


def _vision(hf: HfConfig) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape for the tensors of the vision tower (MoonViT) and its projector, as in the published
    files."""
    vision = hf["vision_config"]
    wide = vision["vt_hidden_size"]
    inner = vision["vt_intermediate_size"]
    patch = vision["patch_size"]
    down, across = vision["merge_kernel_size"]
    seen = vision["mm_hidden_size"]
    merged = seen * down * across
    block: dict[str, tuple[int, ...]] = {
        "mlp.fc0": (inner, wide),
        "mlp.fc1": (wide, inner),
        "norm0": (wide,),
        "norm1": (wide,),
        "wo": (wide, wide),
        "wqkv": (3 * wide, wide),
    }
    modules: dict[str, tuple[int, ...]] = {"vision_tower.patch_embed.proj": (wide, 3, patch, patch)}
    for layer in range(vision["vt_num_hidden_layers"]):
        for name, shape in block.items():
            modules[f"vision_tower.encoder.blocks.{layer}.{name}"] = shape
    modules |= {
        "vision_tower.encoder.final_layernorm": (wide,),
        "mm_projector.pre_norm": (seen,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (hf["text_config"]["hidden_size"], merged),
    }
    positions = vision["init_pos_emb_height"], vision["init_pos_emb_width"], wide
    weights = {f"{name}.weight": shape for name, shape in modules.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in modules.items()}
    return {"vision_tower.patch_embed.pos_emb.weight": positions, **weights, **biases}
