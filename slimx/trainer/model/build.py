"""Builds this rank's part of the model as Megatron GPT modules, wrapped for data parallelism: one module per pipeline
chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter

from slimx.adapters.megatron import attention as megatron_attention
from slimx.adapters.megatron.param_gather import wait_by_layer
from slimx.config.schema import Config
from slimx.layout.form import AttachedForm, form_of
from slimx.layout.megatron import MegatronLayout
from slimx.layout.patterns import names_of
from slimx.layout.ranks import sizes_of
from slimx.models.families import ModelSpec
from slimx.numerics.mode import NumericsMode, mode_of
from slimx.numerics.rounding import Rounding, rounding_of
from slimx.trainer.device.backends import Backends
from slimx.trainer.model import projection_norm
from slimx.trainer.model.policy_model import PolicyModel, with_prediction_layers
from slimx.trainer.model.transformer import transformer_config
from slimx.trainer.moe import router


def build_model(
    spec: ModelSpec,
    config: Config,
    backends: Backends,
    *,
    device: torch.device,
    kind: type[GPTModel] = PolicyModel,
) -> tuple[list[DistributedDataParallel], AttachedForm]:
    """Builds this rank's chunks of the model in the order of the forward pass, and the attached parameters, such as
    LoRA adapters. Weights are not loaded. There are several chunks only with virtual pipeline stages. Frozen parameters
    (`ModelSpec.frozen`) have no gradient. `kind`: class of the model, such as a critic's."""
    transformer = transformer_config(spec, config, backends, cpu=device.type == "cpu")
    mode = mode_of(config)
    options: dict[str, object] = {}
    if kind is PolicyModel:
        options = {"logprob_chunk_tokens": config.trainer.logprob_chunk_tokens, "head": mode.head()}
    virtual = config.trainer.virtual_pipeline
    make = partial(spec.layer_kind.model_class(kind, sizes_of(config.trainer)), **options)
    # Transformer Engine's layers quantize internally (see `transformer_config`), so nothing is done here for them.
    rounding = Rounding() if backends.transformer_engine else rounding_of(config.trainer)
    indices = range(virtual) if virtual > 1 else (None,)
    chunks = [build_chunk(make, spec, transformer, index, device, mode, rounding) for index in indices]
    _freeze(chunks, spec, config)
    attached = form_of(config).attach(unwrap(chunks[0]), spec.table)
    # `disable_bucketing` is not set: gloo would gather the merged buckets of a group as if they had one dtype, which
    # would round the fp32 value head of a bf16 critic and mix up its elements.
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
    names = names_of(frozen, layout.parts_of(dist.get_rank()))
    for index, chunk in enumerate(chunks):
        prefix = f"{index}." if len(chunks) > 1 else ""
        chunk_names = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        freeze(unwrap(chunk), chunk_names, recompute=config.trainer.recompute.granularity != "none")


def freeze(module: torch.nn.Module, names: Collection[str], *, recompute: bool) -> None:
    """Freezes the parameters `names` of a chunk, before it is wrapped for data parallelism. Frozen parameters have no
    gradient and no optimizer state, but are published, exported and saved in checkpoints. `recompute`: True if the
    backward pass recomputes parts of the model."""
    parameters = dict(module.named_parameters())
    for name in names:
        if name in parameters:  # a router's selection bias is a buffer, which has no gradient anyway
            parameters[name].requires_grad_(False)
    embedding = getattr(module, "embedding", None)
    trainable = any(parameter.requires_grad for parameter in parameters.values())
    if embedding is None or any(parameter.requires_grad for parameter in embedding.parameters()):
        return
    # If the embedding is frozen, its output must require a gradient in two cases. A recomputed layer gets no gradient
    # if its input requires none, because torch's checkpoint depends on its inputs. And a pipeline stage without
    # trainable parameters needs an output that accepts the next stage's gradient. Otherwise, the backward pass may end
    # at the first trainable layer.
    if recompute or not trainable:
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def build_chunk(
    make: Callable[..., GPTModel],
    spec: ModelSpec,
    transformer: TransformerConfig,
    chunk: int | None,
    device: torch.device,
    mode: NumericsMode,
    rounding: Rounding,
) -> torch.nn.Module:
    """Builds one chunk of the model on this rank, not wrapped for data parallelism. `make`: constructor of the model,
    see `LayerKind.model_class`. `chunk`: index of the virtual pipeline stage; None if there are no such stages. `mode`
    and `rounding`: numerics mode and low-precision rounding, either of which may replace layers of megatron-core."""
    layers = spec.layer_kind.decoder_spec(transformer, chunk)
    if transformer.multi_latent_attention:
        megatron_attention.install_latent(layers)
    router.install(layers)
    if spec.normalizes_projections:
        projection_norm.install(layers, transformer)
    if transformer.softmax_type == "learnable":
        megatron_attention.install_for_sinks(layers)
    rounding.exchange_layers(layers)
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
            # Float16Module also casts buffers, but the selection bias must be fp32 before its values are loaded.
            module._maintain_float32_expert_bias()
        elif getattr(module, "IN_FP32", False):  # modules of extras set this
            module.float()
        for parameter in spec.layer_kind.fp32_parameters(module):
            parameter.data = parameter.data.float()
    return halved


def unwrap(model: torch.nn.Module) -> GPTModel:
    """Returns the GPT model inside its wrappers for data parallelism and half precision."""
    inner: GPTModel = model
    while hasattr(inner, "module"):
        inner = inner.module
    return inner
