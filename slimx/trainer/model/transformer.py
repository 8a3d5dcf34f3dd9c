"""megatron-core's configuration of a model under given parallel sizes."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from slimx.config.schema import Config
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError, one_line
from slimx.models.families import ModelSpec
from slimx.numerics.mode import mode_of
from slimx.numerics.rounding import rounding_of
from slimx.trainer.device.backends import Backends

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}
"""Activation functions, keyed by their name in a model family's `activation_func`. megatron-core selects fused kernels
by these function objects."""


@dataclasses.dataclass
class YarnTransformerConfig(TransformerConfig):
    """TransformerConfig with additional fields: GPTModel reads them if position_embedding_type is yarn, but
    TransformerConfig in megatron-core 0.19.2 does not declare them."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True


def _kind(spec: ModelSpec) -> type[TransformerConfig]:
    if spec.transformer.get("multi_latent_attention"):
        return MLATransformerConfig
    if spec.gpt["position_embedding_type"] == "yarn":
        return YarnTransformerConfig
    return TransformerConfig


def transformer_config(spec: ModelSpec, config: Config, backends: Backends, *, cpu: bool) -> TransformerConfig:
    """Returns megatron-core's configuration of the model `spec` with the parallel sizes in `config`; `trainer.megatron`
    overrides individual fields. Raises SlimxError for settings that megatron-core rejects."""
    trainer = config.trainer
    kind = _kind(spec)
    check_megatron_fields(trainer.megatron, kind)
    _check_sinks(spec, trainer, backends)
    if (trainer.megatron.get("mtp_num_layers") or 0) != spec.table.mtp_layers:
        raise SlimxError(
            f"trainer.megatron.mtp_num_layers is {trainer.megatron.get('mtp_num_layers')}, but {spec.path} was read "
            f"with {spec.table.mtp_layers} MTP layers; pass the same number as mtp_layers to read_model",
            code="trainer.mtp_layers",
            about="trainer.megatron.mtp_num_layers",
        )
    fields = _fields(spec, config, backends, cpu=cpu)
    try:
        return kind(**{**fields, **trainer.megatron})
    except (ValueError, AssertionError) as error:
        raise SlimxError(
            f"megatron-core rejects the model in {spec.path} with the configured parallel sizes ({one_line(error)}); "
            "change the setting that the error names",
            code="trainer.megatron_core",
            about=spec.path,
        ) from error


def _check_sinks(spec: ModelSpec, trainer: Trainer, backends: Backends) -> None:
    if spec.transformer.get("softmax_type") == "learnable" and backends.attention in ("flash", "fused"):
        raise SlimxError(
            f"trainer.attention={backends.attention} has no kernel for the attention sinks of {spec.path} with "
            "packed sequences; set trainer.attention=auto to use torch's scaled_dot_product_attention",
            code="trainer.attention_sinks",
            about="trainer.attention",
        )


def _fields(spec: ModelSpec, config: Config, backends: Backends, *, cpu: bool) -> dict[str, object]:
    trainer = config.trainer
    dtype = DTYPES[config.numerics.dtype]
    rounding = rounding_of(trainer).fields() if backends.transformer_engine else {}
    return {
        **spec.transformer,
        "mtp_num_layers": spec.table.mtp_layers or None,
        "activation_func": ACTIVATIONS[spec.transformer.get("activation_func", "silu")],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": trainer.tensor,
        **_pipeline_fields(trainer, spec, cpu=cpu),
        "context_parallel_size": trainer.context,
        "expert_model_parallel_size": trainer.expert,
        "expert_tensor_parallel_size": trainer.expert_tensor_size,
        # megatron-core requires sequence parallelism for MoE with tensor parallelism.
        "sequence_parallel": trainer.tensor > 1,
        "variable_seq_lengths": True,
        "attention_backend": AttnBackend[backends.attention],
        "moe_token_dispatcher_type": backends.dispatcher,
        "moe_flex_dispatcher_backend": backends.flex_backend,
        # Packed micro-batches differ in length, but HybridEP requires the same number of tokens from every rank.
        "moe_hybridep_pad_uneven_dispatch_inputs": backends.dispatcher == "flex"
        and backends.flex_backend == "hybridep",
        "moe_router_dtype": "fp32",
        # megatron-core would update the router's selection bias before the optimizer step even if that is skipped, and
        # count padding. slimx.trainer.moe.routing updates it instead if trainer.moe.bias_update_rate is set.
        "moe_router_bias_update_rate": 0.0,
        # The loss includes its global denominator, so gradients are summed, not averaged, over micro-batches and ranks.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": backends.gradient_accumulation_fusion,
        **_recompute_fields(trainer),
        "fine_grained_activation_offloading": bool(trainer.offload_activations),
        "offload_modules": list(trainer.offload_activations),
        # Without initialization (perform_initialization=False) parameters would not be marked as tensor parallel, and
        # the gradient norm would count the shards of one TP rank only.
        "use_cpu_initialization": cpu,
        **_fusion_fields(spec, backends),
        **rounding,
        # Makes a layer's spec contain the activation function, so that a numerics mode can replace it.
        "use_te_activation_func": mode_of(config).replaces_layers,
    }


def _pipeline_fields(trainer: Trainer, spec: ModelSpec, *, cpu: bool) -> dict[str, object]:
    virtual = trainer.virtual_pipeline > 1
    fields: dict[str, object] = {
        "pipeline_model_parallel_size": trainer.pipeline,
        "virtual_pipeline_model_parallel_size": trainer.virtual_pipeline if virtual else None,
        # Interleaved stages send and receive at the same time, for which megatron-core requires unbatched messages.
        "overlap_p2p_comm": virtual,
        "batch_p2p_comm": not virtual,
        # Frees the memory of a sent activation immediately. gloo may read it later, when it sends: with overlapping
        # messages, activations would be silently corrupted.
        "deallocate_pipeline_outputs": not cpu,
    }
    if trainer.layers_per_stage and trainer.pipeline > 1:
        stages = [["decoder"] * count for count in trainer.layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1] += ["mtp"] * spec.table.mtp_layers + ["loss"]
        fields["pipeline_model_parallel_layout"] = stages
    return fields


def _fusion_fields(spec: ModelSpec, backends: Backends) -> dict[str, object]:
    """Returns the fields that enable fused kernels: Megatron-LM's defaults if Transformer Engine computes the layers;
    otherwise all are off."""
    engine = backends.transformer_engine
    return {
        # The unfused rotation waits twice in every layer until it has read the sequence bounds from the GPU.
        "apply_rope_fusion": engine and fused_rotation(spec),
        # torch compiles this fusion, which needs a compiler on the host: off if the layers are plain torch.
        "bias_activation_fusion": engine and spec.transformer.get("activation_func") != "squared_relu",
        "moe_permute_fusion": backends.permute_fusion and spec.experts > 0,
    }


def fused_rotation(spec: ModelSpec) -> bool:
    """Returns True if a fused kernel for rotary embeddings of packed sequences computes the same result as
    megatron-core's unfused code for this model."""
    fields = spec.transformer
    if not fields.get("multi_latent_attention", False):
        # Transformer Engine's kernel, which omits yarn's scaling factor for queries and keys.
        return spec.gpt["position_embedding_type"] != "yarn"
        # megatron-core's Triton kernels, which support only yarn, and only widths that are powers of 2.
    if fields["rope_type"] != "yarn" or not spec.layer_kind.fuses_rotation:
        return False
    widths = (fields["qk_head_dim"], fields["qk_pos_emb_head_dim"], fields["v_head_dim"])
    return all(width.bit_count() == 1 for width in widths)


def _recompute_fields(trainer: Trainer) -> dict[str, object]:
    recompute = trainer.recompute
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.layers,
    }


def check_megatron_fields(fields: Iterable[str], kind: type[TransformerConfig]) -> None:
    """Checks that the configuration class `kind` has every field in `fields`, which `trainer.megatron` sets. Otherwise
    raises SlimxError with the most similar field as a suggestion."""
    known = [field.name for field in dataclasses.fields(kind)]
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; remove this field"
            raise SlimxError(
                f"trainer.megatron.{key} is not a field of megatron-core's {kind.__name__}{hint}",
                code="trainer.megatron_field",
                about=f"trainer.megatron.{key}",
            )
