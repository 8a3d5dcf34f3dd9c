"""Builds the Megatron GPT model of this rank, wrapped for data parallelism: one module per pipeline chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter

from slimx.adapters.megatron import attention as megatron_attention
from slimx.adapters.megatron import delta_net as megatron_delta_net
from slimx.adapters.megatron import fp8 as megatron_fp8
from slimx.adapters.megatron import latent as megatron_latent
from slimx.adapters.megatron import mamba as megatron_mamba
from slimx.adapters.megatron import sparse as megatron_sparse
from slimx.adapters.megatron.param_gather import wait_by_layer
from slimx.config.schema import Config
from slimx.layout.form import AttachedForm, form_of
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import Sizes, sizes_of
from slimx.models.families import ModelSpec
from slimx.models.state_space import PATTERN
from slimx.numerics.mode import NumericsMode, mode_of
from slimx.reshard.plan.precision import RECIPES, Recipe
from slimx.trainer.device.backends import Backends
from slimx.trainer.model import projection_norm
from slimx.trainer.model.freeze import freeze, names_of
from slimx.trainer.model.hybrid_model import HybridPolicyModel, segments
from slimx.trainer.model.policy_model import PolicyModel, with_prediction_layers
from slimx.trainer.model.transformer import transformer_config
from slimx.trainer.model.value_model import ValueHead, ValueModel
from slimx.trainer.moe import router


def build_model(
    spec: ModelSpec,
    config: Config,
    backends: Backends,
    *,
    device: torch.device,
    kind: type[PolicyModel] | type[ValueModel] = PolicyModel,
) -> tuple[list[DistributedDataParallel], AttachedForm]:
    """This rank's chunks of the model in the order of the forward pass, their weights not yet loaded, and what stands
    beside these; more than one chunk with virtual pipeline stages only. What is frozen (`ModelSpec.frozen`) has no
    gradient."""
    transformer = transformer_config(spec, config, backends, cpu=device.type == "cpu")
    mode = mode_of(config)
    options = (
        {"logprob_chunk_tokens": config.trainer.logprob_chunk_tokens, "head": mode.head()}
        if kind is PolicyModel
        else {}
    )
    virtual = config.trainer.virtual_pipeline
    make = partial(model_kind(spec, sizes_of(config.trainer), kind), **options)
    # Transformer Engine's layers compute in fp8 themselves, see `transformer_config`.
    emulated = None if backends.transformer_engine else RECIPES.get(config.trainer.fp8)
    chunks = [
        build_chunk(make, spec, transformer, chunk if virtual > 1 else None, device, mode, emulated)
        for chunk in range(virtual)
    ]
    _freeze(chunks, spec, config)
    attached = form_of(config).attach(unwrap(chunks[0]), spec.table)
    # Buckets stay apart (no `disable_bucketing`): gloo gathers those of one group as if they had one dtype, which would
    # round the fp32 value head of a bf16 critic and mix up its elements.
    wrapped = [
        DistributedDataParallel(
            transformer,
            DistributedDataParallelConfig(
                use_distributed_optimizer=config.trainer.distributed_optimizer,
                grad_reduce_in_fp32=config.trainer.grad_reduce_in_fp32,
                overlap_grad_reduce=backends.overlap_grad_reduce,
                overlap_param_gather=backends.overlap_param_gather,
                bucket_size=config.trainer.grad_bucket_elements,
            ),
            chunk,
        )
        for chunk in chunks
    ]
    if backends.overlap_param_gather:
        for chunk in wrapped:
            wait_by_layer(chunk, unwrap(chunk))
    return wrapped, attached


def _freeze(chunks: list[torch.nn.Module], spec: ModelSpec, config: Config) -> None:
    frozen = spec.frozen(config.trainer.frozen)
    if not frozen:
        return
    layout = MegatronLayout(spec.table, sizes_of(config.trainer))
    names = names_of(frozen, layout.held(dist.get_rank()))
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if len(chunks) > 1 else ""
        own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        freeze(unwrap(chunk), own, recompute=config.trainer.recompute.granularity != "none")


def model_kind(
    spec: ModelSpec, sizes: Sizes, kind: type[PolicyModel] | type[ValueModel] = PolicyModel
) -> Callable[..., PolicyModel | ValueModel]:
    """The class that chunks are made of, `kind` unless the model has state-space layers."""
    if pattern := spec.transformer.get(PATTERN):
        return partial(HybridPolicyModel, hybrid_layer_pattern=segments(pattern, sizes.split, sizes.stages))
    return kind


def build_chunk(
    make: Callable[..., PolicyModel | ValueModel],
    spec: ModelSpec,
    transformer: TransformerConfig,
    chunk: int | None,
    device: torch.device,
    mode: NumericsMode,
    recipe: Recipe | None,
) -> torch.nn.Module:
    """One module of this rank, not yet wrapped for data parallelism. `make`: as `model_kind` says. `chunk`: its number,
    None without virtual pipeline stages. `recipe`: of plain torch's layers that compute in fp8."""
    if transformer.is_hybrid_model:
        layers = megatron_mamba.stack_spec(transformer)
        router.install_in(layers.submodules.moe_layer)
    else:
        layers = _gpt_layers(transformer, chunk)
        megatron_latent.install(layers)
        router.install(layers)
    if spec.normalises_projections:
        projection_norm.install(layers, transformer)
    if transformer.softmax_type == "learnable":
        megatron_attention.install_for_sinks(layers)
    if recipe is not None:
        megatron_fp8.install(layers, recipe)
    gpt = mode.exchange_layers(layers, transformer, spec.gpt)
    if transformer.mtp_num_layers:
        block = get_gpt_mtp_block_spec(transformer, layers, use_transformer_engine=True, vp_stage=chunk)
        gpt = gpt | {"mtp_block_spec": with_prediction_layers(block)}
    model = make(
        transformer,
        layers,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
        **gpt,
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
        elif isinstance(module, DSAIndexer):
            module.k_norm.float()  # as checkpoints and engines have it
        elif isinstance(module, MambaMixer):
            for parameter in (module.A_log, module.D):  # as megatron-core makes them
                parameter.data = parameter.data.float()
    return halved


def _gpt_layers(transformer: TransformerConfig, chunk: int | None) -> Any:
    if transformer.experimental_attention_variant == megatron_delta_net.VARIANT:
        return megatron_delta_net.decoder_spec(transformer, chunk)
    if transformer.experimental_attention_variant == "dsa":
        return megatron_sparse.block_spec(transformer, vp_stage=chunk)
    return get_gpt_decoder_block_spec(transformer, use_transformer_engine=True, vp_stage=chunk)


def unwrap(model: torch.nn.Module) -> PolicyModel | ValueModel:
    """The GPT model inside its data-parallel and half-precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
