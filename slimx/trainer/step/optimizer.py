"""Builds megatron-core's optimizer, computes the learning rate from the step alone, and performs optimizer steps. All
ranks together skip a step whose gradient is not finite, or is 0 everywhere.

gradients of all ranks -> norm -> finite on every rank?  -- yes -->  clip -> Adam -> weights
                                                         -- no --->  nothing changes; counted, error after n
                                  0 on every rank?       -- yes -->  nothing changes; counted

A gradient that is 0 everywhere, for example because all rollouts of each group have the same reward, must not change
the weights. However, without the skip, Adam's moments of earlier steps would continue to move the weights, and weight
decay would shrink them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate

from slimx import entry_points
from slimx.config.schema import Config
from slimx.config.sections.trainer import Optimizer
from slimx.errors import SlimxError, counted
from slimx.trainer.model.transformer import DTYPES

_TOWER = "*visual.*"
"""Pattern of the names of a vision tower's parameters."""
STATES = "slimx.optimizer_states"
"""Entry-point group for subclasses of `ExternalState`. The name of each entry point is the location of the state, such
as "host"."""


class ExternalState:
    """Wrapper around a torch optimizer that stores the optimizer's state elsewhere, such as on the host."""

    def make_state(self) -> None:
        """Creates the initial optimizer state (zeros for Adam) for those parameters that have none yet and whose state
        is to be stored elsewhere."""
        raise NotImplementedError


def build_optimizer(
    config: Config, chunks: list[DistributedDataParallel], undecayed: Iterable[torch.nn.Parameter] = ()
) -> ChainedOptimizer:
    """Builds Adam, or Muon with Adam for parameters that are not matrices, with main weights in fp32. As configured,
    the optimizer's state is sharded over data-parallel ranks or stored on the host. `undecayed`: parameters without
    weight decay in addition to norms and biases. Steps must be performed by an `OptimizerStep`."""
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
        # Every rank orthogonalizes the full matrix, so that updates do not depend on the parallel sizes.
        muon_tp_mode="duplicated",
        muon_fp32_matmul_prec="highest" if config.numerics.dtype == "float32" else "medium",
        **_precision(options),
    )
    # Keeps megatron-core's own fp32 main weights, which checkpoints and offloading expect.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    groups = _groups(settings, undecayed)
    vision = config.trainer.vision
    if vision and vision.lr_scale != 1:  # megatron-core confuses groups of equal values when it loads
        groups[ParamKey(name=_TOWER)] = {"lr_mult": vision.lr_scale}
    optimizer = get_megatron_optimizer(settings, chunks, groups)
    if options.offload_fraction:
        on_host = entry_points.load(STATES, "host")
        for part in optimizer.chained_optimizers:
            if part.optimizer is not None:
                part.optimizer = on_host(part.optimizer, options.offload_fraction)
    return optimizer


def _precision(options: Optimizer) -> dict[str, object]:
    if options.moments_dtype == "float32":
        return {}
    moments = DTYPES[options.moments_dtype]
    return {"use_precision_aware_optimizer": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}


def make_moments(part: MegatronOptimizer) -> None:
    """Creates Adam's initial moments, zeros, for the parameters of `part` (one of the chained optimizers) that have no
    moments yet."""
    inner = part.optimizer
    if part.config.use_precision_aware_optimizer:
        # megatron-core 0.19.2 does not pass the second argument, which Transformer Engine 2.20.2 requires.
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.initialize_state(parameter, store_param_remainders=False)
        return
    if isinstance(inner, ExternalState):
        inner.make_state()
    part.init_state_fn(inner, part.config)


def _groups(config: OptimizerConfig, undecayed: Iterable[torch.nn.Parameter]) -> dict[ParamKey, ParamGroupOverride]:
    """Returns the overrides that define parameter groups in addition to the default one: norms, biases and `undecayed`,
    without weight decay; and the fp32 parameters of a bf16 model, such as a value head.

    fp32 parameters need a separate group, because megatron-core 0.19.2's distributed optimizer swaps the states of
    parameters when it saves a group of both dtypes: it numbers parameters in the order of its buffers, but stores fp32
    parameters first."""
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
    """Returns the learning rate of optimizer step `step`, counted from 0, out of `steps`: linear warmup, then a
    constant, or a linear or cosine decay."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    span = max(1, steps - 1 - options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / span)
    if options.decay == "constant":
        return options.lr
    remaining = 1 - progress if options.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return options.min_lr + (options.lr - options.min_lr) * remaining


class OptimizerStep:
    """Performs the steps of one optimizer. Collective: all ranks of `group` call it at the same time and make the same
    decisions."""

    def __init__(
        self,
        optimizer: ChainedOptimizer,
        options: Optimizer,
        named: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        key: str = "trainer.optimizer",
        metrics: str = "optim",
    ):
        """Prepares steps of `optimizer`, a result of `build_optimizer`. `options`: configuration section of the
        optimizer. `key`: key of this section, for messages. `named`: this rank's trainable parameters in the order of
        the forward pass, keyed by the names that messages use. `group`: process group for CPU tensors (gloo) with all
        ranks of the model. `metrics`: first component of the metrics' names."""
        self.optimizer = optimizer
        self.options = options
        self.named = dict(named)
        self.group = group
        self.key = key
        self.prefix = metrics
        self.skipped_in_a_row = 0

    def __call__(self, rate: float) -> dict[str, float]:
        """Applies the current gradients with learning rate `rate`, and returns metrics.

        The step is skipped if a gradient is not finite, or if the gradient of all loss terms together is exactly 0
        everywhere. Then weights, moments and Adam's step count stay unchanged, bit for bit. Raises SlimxError on every
        rank after `max_skipped` consecutive steps with non-finite gradients, naming the parameters where non-finite
        gradients first appeared in the backward pass."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_mult"]
            # megatron-core's scheduler, which is not used here, would apply wd_mult (0 in groups without weight decay).
            group["weight_decay"] = self.options.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm() or 0.0)
        # The norm can be 0 although not all gradients are, because the squares of tiny numbers are 0 in fp32.
        local_empty = norm == 0 and not any(_any(parameter) for parameter in self.named.values())
        finite, empty = self._everywhere(math.isfinite(norm), local_empty)
        if not finite:
            self._skip(norm)
        else:
            self.skipped_in_a_row = 0
            if not empty:
                self._clip(norm)
                self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()  # frees fp32 copies of bf16 gradients, but not the buffers
        values = {"lr": rate, "grad_norm": norm, "skipped": float(not finite), "zero_gradient": float(empty)}
        return {f"{self.prefix}/{name}": value for name, value in values.items()}

    def _everywhere(self, *conditions: bool) -> list[bool]:
        # The norm should be equal on all ranks anyway, but a single rank that performs a step would diverge forever.
        votes = torch.tensor(conditions, dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.group)
        return [bool(vote) for vote in votes.tolist()]

    def _clip(self, norm: float) -> None:
        if not self.options.clip_grad:
            return
        for part in self.optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, self.options.clip_grad, norm)

    def _skip(self, norm: float) -> None:
        self.skipped_in_a_row += 1
        origin = first_nonfinite(self.named, self.group)
        print(f"slimx: optimizer step skipped because the gradient norm is {norm}: {origin}", flush=True)
        if self.skipped_in_a_row >= self.options.max_skipped > 0:
            raise SlimxError(
                f"{self.skipped_in_a_row} consecutive optimizer steps (the limit {self.key}.max_skipped) were skipped "
                f"because the gradient norm was not finite (at the last step, {origin}); lower the learning rate if "
                "the loss diverged, and resume from the newest checkpoint",
                code="trainer.max_skipped",
                about=f"{self.key}.max_skipped",
            )


def first_nonfinite(named: Mapping[str, torch.nn.Parameter], group: dist.ProcessGroup) -> str:
    """Returns a description of where gradients are not finite, the same on all ranks. Collective.

    The description names a parameter and its rank: the last affected parameter, in the order of the forward pass, on
    the affected rank with the highest number. The backward pass reached this parameter first, because ranks of later
    pipeline stages have higher numbers, and the parameters before it are affected as a consequence."""
    bad = [name for name, parameter in named.items() if not _finite(parameter)]
    last = bad[-1] if bad else None
    report = (last, len(bad), len(named))
    reports: list[tuple[str | None, int, int]] = [report] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    affected = []
    total = 0
    for rank, (name, count, parameters) in enumerate(reports):
        total += count
        if name is not None:
            affected.append(f"{name} on trainer rank {rank} ({count} of its {parameters} parameters")
    if not affected:
        return "every gradient is finite, but the sum of their squares overflows"
    if len(affected) == 1:
        return f"first in {affected[0]})"
    return f"first in {affected[-1]}, {total} on {counted(len(affected), 'rank')})"


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return getattr(parameter, "main_grad", parameter.grad)


def _finite(parameter: torch.nn.Parameter) -> bool:
    gradient = _gradient(parameter)
    return gradient is None or bool(torch.isfinite(gradient).all())


def _any(parameter: torch.nn.Parameter) -> bool:
    """Returns True if the parameter has a gradient with a nonzero element."""
    gradient = _gradient(parameter)
    return gradient is not None and bool(gradient.any())
