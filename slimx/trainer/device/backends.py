"""Chooses the trainer's kernels from the configuration and the installed packages, with reasons."""

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
"""fla is flash-linear-attention; fused_weight_gradient_mlp_cuda is apex's extension."""
FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
"""Distributions by whose metadata Transformer Engine 2.20 detects FlashAttention. Importing flash_attn proves nothing:
flash-attn-4, which SGLang installs, contains part of that module."""
HYBRID = "HybridEPBuffer"
"""The class of DeepEP's branch hybrid-ep; sgl-deep-ep 0.1.2 lacks it on every architecture."""

Attention = Literal["auto", "flash", "fused", "unfused"]


@dataclass(frozen=True, slots=True)
class Backends:
    """The kernels of one run, equal on all ranks."""

    attention: Attention
    """Name of megatron-core's AttnBackend; auto leaves the choice to Transformer Engine."""
    dispatcher: Literal["alltoall", "flex"]
    flex_backend: Literal["deepep", "hybridep"]
    transformer_engine: bool
    """True if the layers are Transformer Engine's, else plain torch layers of the same shape."""
    gradient_accumulation_fusion: bool
    """True if the weight gradient's matrix product accumulates into the fp32 gradient directly."""
    permute_fusion: bool
    """True if Transformer Engine's kernels sort tokens by expert."""
    overlap_grad_reduce: bool
    """True if gradients are reduced over ranks during the backward pass."""
    overlap_param_gather: bool
    """True if updated weights are gathered over ranks during the next forward pass."""
    reasons: tuple[str, ...]
    """One sentence per choice, for the log."""


def installed() -> frozenset[str]:
    """Lists installed packages that affect a choice: modules, distributions of FlashAttention, and `HYBRID`. Imports
    none of them."""
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
    """Resolves `auto` and refuses backends that cannot run. `packages`: `installed()` on the trainer's hosts.
    `replaced`: numerics.mode replaces plain torch layers. `layer_kind`: of the model. `experts`: routed experts of a
    layer.

    Raises SlimxError naming the configuration key and the missing package."""
    if replaced:
        packages = set(packages) - {"transformer_engine"}
    _check_offload(trainer, device, packages)
    _check_moments(trainer, device, packages)
    attention, why_attention = _attention(trainer.attention, device, packages)
    if replaced:
        why_attention = "attention and layers: as defined by numerics.mode"
    fusion, why_fusion = _fusion(device, packages)
    dispatcher = trainer.moe.dispatcher
    if dispatcher == "flex":
        why_dispatcher = f"moe.dispatcher flex ({trainer.moe.flex_backend}): as configured"
        _check_flex(trainer, device, packages)
    else:
        why_dispatcher = "moe.dispatcher alltoall: as configured"
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
        reasons=reasons,
    )


def has_engine(device: str, packages: Collection[str]) -> bool:
    """Returns True if Transformer Engine computes the layers: it must be installed, and has no CPU kernels."""
    return device == "cuda" and "transformer_engine" in packages


def _attention(choice: Attention, device: str, packages: Collection[str]) -> tuple[Attention, str]:
    engine = has_engine(device, packages)
    if choice == "auto":
        if engine:
            return "auto", "attention: Transformer Engine chooses its fastest kernel for each shape"
        missing = "Transformer Engine is not installed" if device == "cuda" else "there is no CUDA"
        return "unfused", f"attention unfused: {missing}, so torch's scaled_dot_product_attention computes it"
    if choice == "unfused":
        kernel = "Transformer Engine's" if engine else "torch's scaled_dot_product_attention"
        return "unfused", f"attention unfused: as configured ({kernel})"
    if not engine:
        raise SlimxError(
            f"trainer.attention={choice} needs {_missing_engine(device)}, which is not available; set "
            "trainer.attention=auto or install it",
            code=_missing_code(device),
            about="trainer.attention",
        )
    if choice == "flash":
        flash = [name for name in FLASH if name in packages]
        if not flash:
            raise SlimxError(
                f"trainer.attention=flash needs one of the packages {', '.join(FLASH)}, and none is installed; install "
                "one, or set trainer.attention=fused or auto",
                code="trainer.not_installed",
                about="trainer.attention",
            )
        return choice, f"attention flash: as configured ({', '.join(flash)})"
    return choice, f"attention {choice}: as configured"


def _missing_engine(device: str) -> str:
    return "the package transformer_engine" if device == "cuda" else "CUDA"


def _missing_code(device: str) -> str:
    return "trainer.not_installed" if device == "cuda" else "trainer.no_cuda"


def _fusion(device: str, packages: Collection[str]) -> tuple[bool, str]:
    name = "gradient-accumulation fusion"
    if device != "cuda":
        return False, f"{name} off: there is no CUDA"
    if "fused_weight_gradient_mlp_cuda" in packages:
        return True, f"{name} on: apex's extension is installed"
    # megatron-core requires apex's extension even where Transformer Engine's layers would not need it.
    return False, f"{name} off: NVIDIA's apex (fused_weight_gradient_mlp_cuda) is not installed"


def _permute_fusion(device: str, packages: Collection[str]) -> tuple[bool, str]:
    """Chooses fused permutation where possible: the unfused one makes the host wait for `masked_select` in every
    MoE layer."""
    name = "permutation of tokens"
    if device != "cuda":
        return False, f"{name} unfused: there is no CUDA"
    if has_engine(device, packages):
        return True, f"{name} fused: Transformer Engine's kernels"
    return False, f"{name} unfused: Transformer Engine does not compute the layers"


def _overlap(trainer: Trainer, device: str, packages: Collection[str], experts: int) -> tuple[bool, str]:
    name = "reduction of gradients"
    configured = trainer.overlap_grad_reduce
    engine = has_engine(device, packages)
    if configured and experts and not engine:
        # megatron-core's buckets count gradients; if the order differs between ranks, sums of different buckets mix.
        raise SlimxError(
            "trainer.overlap_grad_reduce needs Transformer Engine's layers for a model with experts, but plain torch "
            "layers are used: an expert without tokens gets no gradient from them, and its bucket would wait for it; "
            "remove the key",
            code="trainer.overlap_grad_reduce",
            about="trainer.overlap_grad_reduce",
        )
    if configured is not None:
        moment = "during" if configured else "after"
        return configured, f"{name} {moment} the backward pass: as configured"
    if trainer.data_size * trainer.context == 1:
        return False, f"{name} not needed: there is one data-parallel rank"
    if engine:
        return True, f"{name} during the backward pass, by buckets"
    return False, f"{name} after the backward pass: Transformer Engine does not compute the layers"


def _gather(trainer: Trainer, overlap: bool) -> tuple[str, ...]:
    if not trainer.overlap_param_gather:
        return ()
    if not overlap:
        # megatron-core would then use one bucket for all weights, and the first layer would wait for all of it.
        raise SlimxError(
            "trainer.overlap_param_gather needs the buckets of trainer.overlap_grad_reduce, which is off; set it to "
            "true, or remove trainer.overlap_param_gather",
            code="trainer.overlap_param_gather",
            about="trainer.overlap_param_gather",
        )
    return ("gather of weights during the next forward pass, between the updates of a step: as configured",)


def _check_offload(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    if trainer.offload_activations and not has_engine(device, packages):
        raise SlimxError(
            f"trainer.offload_activations needs {_missing_engine(device)}, which is not available; remove it, and set "
            "trainer.recompute",
            code=_missing_code(device),
            about="trainer.offload_activations",
        )


def _check_moments(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    if trainer.optimizer.moments_dtype != "float32" and not has_engine(device, packages):
        raise SlimxError(
            f"trainer.optimizer.moments_dtype={trainer.optimizer.moments_dtype} needs {_missing_engine(device)}, which "
            "is not available; remove it",
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
        missing = f"{HYBRID} of DeepEP's branch hybrid-ep, which the installed deep_ep lacks"
    if required not in packages:
        raise SlimxError(
            f"{choice} needs {missing}; install it or set trainer.moe.dispatcher=alltoall",
            code="trainer.not_installed",
            about="trainer.moe.dispatcher",
        )
    if trainer.expert * trainer.expert_tensor_size == 1:
        raise SlimxError(
            f"{choice} has nothing to dispatch with trainer.expert=1; raise it or set trainer.moe.dispatcher=alltoall",
            code="trainer.nothing_to_dispatch",
            about="trainer.moe.dispatcher",
        )
