"""Builds the Megatron GPT model of this rank, wrapped for data parallelism."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter

from slimx.config.schema import Config
from slimx.errors import SlimxError
from slimx.models.families import ModelSpec
from slimx.trainer.policy_model import PolicyModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Kernels of apex or Transformer Engine that a machine without CUDA has not.
_NO_FUSION = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
}


def transformer_config(spec: ModelSpec, config: Config, *, cpu: bool) -> TransformerConfig:
    """Megatron's configuration of this model under this layout; `trainer.megatron` overrides single fields."""
    trainer, dtype = config.trainer, DTYPES[config.numerics.dtype]
    kind = MLATransformerConfig if spec.transformer.get("multi_latent_attention") else TransformerConfig
    fields: dict[str, Any] = {
        **spec.transformer,
        "mtp_num_layers": spec.table.mtp_layers or None,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": trainer.tensor,
        "pipeline_model_parallel_size": trainer.pipeline,
        "expert_model_parallel_size": trainer.expert,
        "expert_tensor_parallel_size": trainer.expert_tensor_size,
        # megatron-core refuses MoE with tensor parallelism unless sequence parallelism is on.
        "sequence_parallel": trainer.tensor > 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        # megatron-core would move the router's selection bias after every step; in RL it stays as it was trained.
        "moe_router_bias_update_rate": 0.0,
        # The loss already holds its global denominator: no average over micro-batches or ranks, sums only.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        # Skipping initialisation (perform_initialization=False) would leave the parameters unmarked as tensor
        # parallel, and the gradient norm would count the shards of one TP rank only.
        "use_cpu_initialization": cpu,
        **(_NO_FUSION if cpu else {}),
    }
    check_megatron_fields(trainer.megatron, kind)
    if (trainer.megatron.get("mtp_num_layers") or 0) != spec.table.mtp_layers:
        raise SlimxError(
            f"trainer.megatron.mtp_num_layers is {trainer.megatron.get('mtp_num_layers')}, but {spec.path} was read "
            f"with {spec.table.mtp_layers} MTP layers; give read_model the same number"
        )
    try:
        return kind(**{**fields, **trainer.megatron})
    except (ValueError, AssertionError) as error:
        raise SlimxError(f"megatron-core refuses this model or layout: {' '.join(str(error).split())}") from error


def check_megatron_fields(given: dict[str, Any], kind: type[TransformerConfig]) -> None:
    """Refuse a key of `trainer.megatron` that the configuration does not have, with the nearest one that it has."""
    known = [field.name for field in dataclasses.fields(kind)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SlimxError(f"trainer.megatron.{key} is not a field of megatron-core's {kind.__name__}{hint}")


def build_model(spec: ModelSpec, config: Config, *, device: torch.device) -> DistributedDataParallel:
    """This rank's stage of the model, its weights not yet loaded."""
    transformer = transformer_config(spec, config, cpu=device.type == "cpu")
    layers = get_gpt_decoder_block_spec(transformer, use_transformer_engine=True)
    mtp = None
    if transformer.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(transformer, layers, use_transformer_engine=True)
    model = PolicyModel(
        transformer,
        layers,
        mtp_block_spec=mtp,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **spec.gpt,
    ).to(device)
    if transformer.bf16:
        model = Float16Module(transformer, model)
        for module in model.modules():
            if isinstance(module, TopKRouter):
                # Float16Module halves buffers too; the selection bias is fp32 before its values are loaded.
                module._maintain_float32_expert_bias()
    return DistributedDataParallel(
        transformer,
        DistributedDataParallelConfig(
            use_distributed_optimizer=config.trainer.distributed_optimizer, grad_reduce_in_fp32=True
        ),
        model,
    )


def unwrap(model: torch.nn.Module) -> PolicyModel:
    """The GPT model inside its data-parallel and half-precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
