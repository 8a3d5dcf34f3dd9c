"""Megatron's optimizer for a configuration, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamPredicate

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.trainer import Optimizer
from slimx.trainer.model.transformer import DTYPES

STATES = "slimx.optimizer_states"
"""Entry points: classes of `OwnState` by the place of the state."""


class OwnState:
    """An optimizer that keeps the state of another one elsewhere, in whose place it stands."""

    def make_state(self) -> None:
        """Give parameters that have no state yet the zeros that Adam begins with, where they belong elsewhere."""
        raise NotImplementedError


def build_optimizer(config: Config, chunks: list[Any], undecayed: Iterable[torch.nn.Parameter] = ()) -> Any:
    """Adam, or Muon with Adam for what is no matrix, with fp32 main weights and, as configured, state sharded over
    data-parallel ranks or kept on the host.

    `undecayed`: parameters without weight decay besides norms and biases. `slimx.trainer.step.optimizer_step` steps
    it."""
    options = config.trainer.optimizer
    settings = OptimizerConfig(
        optimizer=options.kind,
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        clip_grad=options.clip_grad,
        bf16=config.numerics.dtype == "bfloat16",
        params_dtype=DTYPES[config.numerics.dtype],
        use_distributed_optimizer=config.trainer.distributed_optimizer,
        muon_momentum=options.muon.momentum,
        muon_nesterov=options.muon.nesterov,
        muon_num_ns_steps=options.muon.steps,
        muon_coefficient_type="quintic",
        muon_extra_scale_factor=options.muon.scale,
        muon_split_qkv=options.muon.split_qkv,
        # Every rank orthogonalises the whole matrix, so that the update does not depend on the layout.
        muon_tp_mode="duplicated",
        muon_fp32_matmul_prec="highest" if config.numerics.dtype == "float32" else "medium",
        **_precision(options),
    )
    # Main weights stay megatron-core's own, in fp32, where checkpoints and the way to the host know them.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    optimizer = get_megatron_optimizer(settings, chunks, _groups(settings, undecayed))
    if options.offload_fraction:
        on_host = entry_points.load(STATES, "host")
        for part in optimizer.chained_optimizers:
            if part.optimizer is not None:
                part.optimizer = on_host(part.optimizer, options.offload_fraction)
    return optimizer


def _precision(options: Optimizer) -> dict[str, Any]:
    if options.moments_dtype == "float32":
        return {}
    moments = DTYPES[options.moments_dtype]
    return {"use_precision_aware_optimizer": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}


def make_moments(part: Any) -> None:
    """Give parameters of the Megatron optimizer `part` that have no state yet the zeros that Adam begins with."""
    inner = part.optimizer
    if part.config.use_precision_aware_optimizer:
        # megatron-core 0.19.2 calls this without the second argument, which Transformer Engine 2.20.2 wants.
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.initialize_state(parameter, store_param_remainders=False)
        return
    if isinstance(inner, OwnState):
        inner.make_state()
    part.init_state_fn(inner, part.config)


def _groups(config: OptimizerConfig, undecayed: Iterable[torch.nn.Parameter]) -> dict[ParamKey, ParamGroupOverride]:
    """Groups of parameters beside the usual one: norms, biases and `undecayed`, which are not decayed; and the fp32
    ones of a bf16 model (a value head).

    In a group of both dtypes megatron-core 0.19.2's distributed optimizer takes the states of one parameter for
    another's when it saves: it numbers them in the order of its buffers but keeps fp32 ones first."""
    overrides = get_standard_config_overrides(config)
    if config.bf16:
        single = ParamPredicate(name="fp32", fn=lambda parameter: parameter.dtype == torch.float32)
        overrides[ParamKey(predicate=single)] = {"lr_mult": 1.0}
    chosen = {id(parameter) for parameter in undecayed}
    if chosen:
        plain = ParamPredicate(name="undecayed", fn=lambda parameter: id(parameter) in chosen)
        overrides[ParamKey(predicate=plain)] = {"wd_mult": 0.0}
    return overrides


def learning_rate(options: Optimizer, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then constant, linear or cosine
    decay."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    span = max(1, steps - 1 - options.warmup_steps)
    done = min(1.0, (step - options.warmup_steps) / span)
    if options.decay == "constant":
        return options.lr
    share = 1 - done if options.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return options.min_lr + (options.lr - options.min_lr) * share
