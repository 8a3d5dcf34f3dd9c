"""Chooses the kernels of the trainer from the configuration and the installed packages, and states the reason for each
choice."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.models.layer_kind import ATTENTION_ONLY, LayerKind
from slimx.numerics.rounding import rounding_of

_MODULES = ("transformer_engine", "deep_ep", "fla", "mamba_ssm", "causal_conv1d", "fused_weight_gradient_mlp_cuda")
"""Python modules whose presence affects the choice of kernels. fla is flash-linear-attention;
fused_weight_gradient_mlp_cuda is an extension of NVIDIA's apex."""
FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
"""Python distributions that Transformer Engine 2.20 looks for, by their metadata, to detect FlashAttention. Importing
the module flash_attn would not show whether FlashAttention is installed, because flash-attn-4, which SGLang installs,
contains a part of this module."""
HYBRID = "HybridEPBuffer"
"""Class of deep_ep that exists only in DeepEP's branch hybrid-ep; the package sgl-deep-ep 0.1.2 lacks it on every
architecture."""

NO_ENGINE = (
    "attention is unfused and uses torch's scaled_dot_product_attention, because Transformer Engine is not installed"
)
ON_CPUS = "trainers use torch's kernels, as always on CPUs; fused kernels need a GPU"
"""Reason that stands for those of all kernels on a CPU, where the only choice is the usual one."""

Attention = Literal["auto", "flash", "fused", "unfused"]


@dataclass(frozen=True, slots=True)
class Backends:
    """Kernels that a run's trainer uses, which are the same on all ranks."""

    attention: Attention
    """Name of the attention backend in megatron-core's AttnBackend; with "auto", Transformer Engine chooses a
    kernel."""
    dispatcher: Literal["alltoall", "flex"]
    flex_backend: Literal["deepep", "hybridep"]
    transformer_engine: bool
    """True if Transformer Engine computes the layers; False if plain torch layers of the same shapes do."""
    gradient_accumulation_fusion: bool
    """True if the matrix product of a weight gradient adds its result directly to the fp32 gradient."""
    permute_fusion: bool
    """True if Transformer Engine's kernels sort tokens by expert."""
    overlap_grad_reduce: bool
    """True if gradients are reduced over data-parallel ranks during the backward pass."""
    overlap_param_gather: bool
    """True if updated weights are gathered from data-parallel ranks during the next forward pass."""
    reasons: tuple[str, ...]
    """Messages that explain the choice of kernels: on GPUs of each kernel, on CPUs only of configured ones."""


def installed() -> frozenset[str]:
    """Returns the installed packages that affect the choice of kernels: names in `_MODULES` and `FLASH`, and `HYBRID`
    if deep_ep has that class. Does not import the packages."""
    names: set[str] = set()
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        names.add(name)
        if name == "deep_ep" and spec.origin is not None and HYBRID in Path(spec.origin).read_text():
            names.add(HYBRID)
    for name in FLASH:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        names.add(name)
    return frozenset(names)


def choose_backends(
    trainer: Trainer,
    *,
    device: str,
    packages: Collection[str],
    replaced: bool = False,
    layer_kind: LayerKind = ATTENTION_ONLY,
    experts: int = 0,
) -> Backends:
    """Chooses kernels where the configuration leaves the choice open ("auto"), and raises SlimxError, naming the
    configuration key and the missing package, if configured kernels cannot run.

    `packages`: result of `installed` on the machines of the trainer. `replaced`: True if `numerics.mode` replaces the
    layers with layers that it defines. `layer_kind`: kinds of layers in the model. `experts`: number of routed experts
    per layer."""
    if replaced:
        packages = set(packages) - {"transformer_engine"}
    _check_offload(trainer, device, packages)
    _check_moments(trainer, device, packages)
    attention, why_attention = _attention(trainer.attention, device, packages)
    if replaced:
        why_attention = "attention and layers are those of numerics.mode"
    fusion, why_fusion = _fusion(device, packages)
    why_dispatcher = ""
    dispatcher = trainer.moe.dispatcher
    if dispatcher == "flex":
        why_dispatcher = f"the token dispatcher is flex ({trainer.moe.flex_backend}), as configured"
        _check_flex(trainer, device, packages)
    why_rounding = rounding_of(trainer).reasons(device, engine=has_engine(device, packages))
    permute, why_permute = _permute_fusion(device, packages)
    overlap, why_overlap = _overlap(trainer, device, packages, experts)
    why_kernels = (why_attention, *layer_kind.kernels(device, packages), why_dispatcher, why_fusion)
    reasons = (*why_kernels, why_permute, why_overlap, *_gather(trainer, overlap), *why_rounding)
    return Backends(
        attention=attention,
        dispatcher=dispatcher,
        flex_backend=trainer.moe.flex_backend,
        transformer_engine=has_engine(device, packages),
        gradient_accumulation_fusion=fusion,
        permute_fusion=permute,
        overlap_grad_reduce=overlap,
        overlap_param_gather=trainer.overlap_param_gather,
        reasons=tuple(filter(None, reasons)),
    )


def has_engine(device: str, packages: Collection[str]) -> bool:
    """Returns True if Transformer Engine computes the layers, which it does on CUDA if it is installed."""
    return device == "cuda" and "transformer_engine" in packages


def _attention(choice: Attention, device: str, packages: Collection[str]) -> tuple[Attention, str]:
    engine = has_engine(device, packages)
    if choice == "auto":
        if engine:
            return "auto", "Transformer Engine chooses its fastest attention kernel for each shape"
        return "unfused", NO_ENGINE if device == "cuda" else ON_CPUS
    if choice == "unfused":
        kernel = "Transformer Engine's" if engine else "torch's scaled_dot_product_attention"
        return "unfused", f"attention is unfused ({kernel}), as configured"
    if not engine:
        raise SlimxError(
            f"trainer.attention={choice} needs {_missing_engine(device)}, which is not available; set "
            "trainer.attention=auto, or install Transformer Engine on a machine with CUDA",
            code=_missing_code(device),
            about="trainer.attention",
        )
    if choice == "flash":
        flash = [name for name in FLASH if name in packages]
        if not flash:
            raise SlimxError(
                f"trainer.attention=flash needs one of the packages {', '.join(FLASH)}, but none is installed; install "
                "one of these packages, or set trainer.attention to fused or auto",
                code="trainer.not_installed",
                about="trainer.attention",
            )
        return choice, f"attention is flash ({', '.join(flash)}), as configured"
    return choice, f"attention is {choice}, as configured"


def _missing_engine(device: str) -> str:
    return "the package transformer_engine" if device == "cuda" else "CUDA"


def _missing_code(device: str) -> str:
    return "trainer.not_installed" if device == "cuda" else "trainer.no_cuda"


def _fusion(device: str, packages: Collection[str]) -> tuple[bool, str]:
    name = "gradient-accumulation fusion"
    if device != "cuda":
        return False, ""
    if "fused_weight_gradient_mlp_cuda" in packages:
        return True, f"{name} is on because apex's extension is installed"
    # megatron-core requires apex's extension even for Transformer Engine's layers, which do not need it.
    return False, f"{name} is off because NVIDIA's apex (fused_weight_gradient_mlp_cuda) is not installed"


def _permute_fusion(device: str, packages: Collection[str]) -> tuple[bool, str]:
    """Decides whether tokens are sorted by expert with fused kernels, and returns the decision and its reason. Without
    fused kernels, the host waits for `masked_select` on the GPU in every MoE layer."""
    name = "permutation of tokens"
    if device != "cuda":
        return False, ""
    if has_engine(device, packages):
        return True, f"{name} is fused by Transformer Engine's kernels"
    return False, f"{name} is unfused because Transformer Engine does not compute the layers"


def _overlap(trainer: Trainer, device: str, packages: Collection[str], experts: int) -> tuple[bool, str]:
    name = "reduction of gradients"
    configured = trainer.overlap_grad_reduce
    engine = has_engine(device, packages)
    if configured and experts and not engine:
        # megatron-core reduces a bucket when it has counted all of its gradients. If ranks do so in different orders,
        # gradients of different buckets are added.
        raise SlimxError(
            "trainer.overlap_grad_reduce with experts in plain torch layers waits forever for gradients of experts "
            "without tokens; remove trainer.overlap_grad_reduce, or install Transformer Engine",
            code="trainer.overlap_grad_reduce",
            about="trainer.overlap_grad_reduce",
        )
    if configured is not None:
        moment = "during" if configured else "after"
        return configured, f"{name} takes place {moment} the backward pass, as configured"
    if device != "cuda" or trainer.data_size * trainer.context == 1:
        return False, ""
    if engine:
        return True, f"{name} takes place during the backward pass, bucket by bucket"
    return False, f"{name} takes place after the backward pass because Transformer Engine does not compute the layers"


def _gather(trainer: Trainer, overlap: bool) -> tuple[str, ...]:
    if not trainer.overlap_param_gather:
        return ()
    if not overlap:
        # megatron-core would then use one bucket for all weights, and the first layer would wait for the whole bucket.
        raise SlimxError(
            "trainer.overlap_param_gather needs the buckets of trainer.overlap_grad_reduce, which is off; set "
            "trainer.overlap_grad_reduce to true, or remove trainer.overlap_param_gather",
            code="trainer.overlap_param_gather",
            about="trainer.overlap_param_gather",
        )
    return ("weights are gathered during the next forward pass, between the updates of a step, as configured",)


def _check_offload(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    if trainer.offload_activations and not has_engine(device, packages):
        raise SlimxError(
            f"trainer.offload_activations needs {_missing_engine(device)}, which is not available; set "
            "trainer.recompute instead of trainer.offload_activations",
            code=_missing_code(device),
            about="trainer.offload_activations",
        )


def _check_moments(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    if trainer.optimizer.moments_dtype != "float32" and not has_engine(device, packages):
        raise SlimxError(
            f"trainer.optimizer.moments_dtype={trainer.optimizer.moments_dtype} needs {_missing_engine(device)}, "
            "which is not available; remove trainer.optimizer.moments_dtype",
            code=_missing_code(device),
            about="trainer.optimizer.moments_dtype",
        )


def _check_flex(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    choice = f"trainer.moe.dispatcher=flex ({trainer.moe.flex_backend})"
    if device != "cuda":
        raise SlimxError(
            f"{choice} needs CUDA, which is not available; set trainer.moe.dispatcher=alltoall",
            code="trainer.no_cuda",
            about="trainer.moe.dispatcher",
        )
    required = "deep_ep"
    missing = "the package deep_ep, which is not installed"
    if trainer.moe.flex_backend == "hybridep":
        required = HYBRID
        missing = f"{HYBRID} of DeepEP's branch hybrid-ep, which is not installed"
    if required not in packages:
        raise SlimxError(
            f"{choice} needs {missing}; install the required version of DeepEP, or set trainer.moe.dispatcher=alltoall",
            code="trainer.not_installed",
            about="trainer.moe.dispatcher",
        )
    if trainer.expert * trainer.expert_tensor_size == 1:
        raise SlimxError(
            f"{choice} has no effect with trainer.expert=1, where tokens stay on their ranks; raise trainer.expert or "
            "set trainer.moe.dispatcher=alltoall",
            code="trainer.nothing_to_dispatch",
            about="trainer.moe.dispatcher",
        )
