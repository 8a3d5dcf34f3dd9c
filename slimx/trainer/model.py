"""Builds the Megatron GPT model of this rank, wrapped for data parallelism: one module per pipeline chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter

from slimx.config.schema import Config
from slimx.models.families import ModelSpec
from slimx.trainer.backends import Backends
from slimx.trainer.policy_model import PolicyModel
from slimx.trainer.prediction_layer import with_prediction_layers
from slimx.trainer.transformer import transformer_config
from slimx.trainer.value_model import ValueHead, ValueModel


def build_model(
    spec: ModelSpec,
    config: Config,
    backends: Backends,
    *,
    device: torch.device,
    kind: type[PolicyModel] | type[ValueModel] = PolicyModel,
) -> list[DistributedDataParallel]:
    """This rank's chunks of the model in the order of the forward pass, their weights not yet loaded; more than one
    with virtual pipeline stages only."""
    transformer = transformer_config(spec, config, backends, cpu=device.type == "cpu")
    options = {"logprob_chunk_tokens": config.trainer.logprob_chunk_tokens} if kind is PolicyModel else {}
    make = partial(kind, **options)
    return [
        DistributedDataParallel(
            transformer,
            DistributedDataParallelConfig(
                use_distributed_optimizer=config.trainer.distributed_optimizer, grad_reduce_in_fp32=True
            ),
            _build_chunk(make, spec, transformer, chunk if config.trainer.virtual_pipeline > 1 else None, device),
            disable_bucketing=chunk > 0,
        )
        for chunk in range(config.trainer.virtual_pipeline)
    ]


def _build_chunk(
    make: Callable[..., PolicyModel | ValueModel],
    spec: ModelSpec,
    transformer: TransformerConfig,
    chunk: int | None,
    device: torch.device,
) -> torch.nn.Module:
    layers = get_gpt_decoder_block_spec(transformer, use_transformer_engine=True, vp_stage=chunk)
    mtp = None
    if transformer.mtp_num_layers:
        mtp = with_prediction_layers(
            get_gpt_mtp_block_spec(transformer, layers, use_transformer_engine=True, vp_stage=chunk)
        )
    model = make(
        transformer,
        layers,
        mtp_block_spec=mtp,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
        **spec.gpt,
    ).to(device)
    if not transformer.bf16:
        return model
    halved = Float16Module(transformer, model)
    for module in halved.modules():
        if isinstance(module, TopKRouter):
            # Float16Module halves buffers too; the selection bias is fp32 before its values are loaded.
            module._maintain_float32_expert_bias()
        elif isinstance(module, ValueHead):
            module.float()
    return halved


def unwrap(model: torch.nn.Module) -> PolicyModel | ValueModel:
    """The GPT model inside its data-parallel and half-precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
