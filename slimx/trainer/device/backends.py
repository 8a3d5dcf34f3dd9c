"""Choice of the kernels that a trainer runs on, from what is asked for and what is installed, with reasons."""

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
"""fla is flash-linear-attention, the last one apex's extension."""
FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
"""Distributions by whose metadata Transformer Engine 2.20 finds FlashAttention. The module flash_attn says nothing:
flash-attn-4, which SGLang installs, brings a part of it."""
HYBRID = "HybridEPBuffer"
"""The class of DeepEP's branch hybrid-ep, which sgl-deep-ep 0.1.2 lacks on every architecture."""

Attention = Literal["auto", "flash", "fused", "unfused"]


@dataclass(frozen=True, slots=True)
class Backends:
    """The kernels of one run, equal on all ranks."""

    attention: Attention
    """Name of megatron-core's AttnBackend; auto leaves the choice to Transformer Engine."""
    dispatcher: Literal["alltoall", "flex"]
    flex_backend: Literal["deepep", "hybridep"]
    transformer_engine: bool
    """The layers are Transformer Engine's; else plain torch's of the same shape."""
    gradient_accumulation_fusion: bool
    """The weight gradient's matrix product adds into the fp32 gradient itself."""
    permute_fusion: bool
    """Tokens are ordered by expert in Transformer Engine's kernels."""
    overlap_grad_reduce: bool
    """Gradients are summed over ranks while the backward pass goes on."""
    overlap_param_gather: bool
    """Updated weights are gathered over ranks beside the next forward pass."""
    reasons: tuple[str, ...]
    """One sentence per choice, for the log."""


def installed() -> frozenset[str]:
    """Names of installed packages that change a choice: modules, distributions of FlashAttention, and `HYBRID`. None is
    imported."""
    found = {name for name in _MODULES if importlib.util.find_spec(name) is not None}
    if "deep_ep" in found:
        origin = importlib.util.find_spec("deep_ep").origin
        found |= {HYBRID} if origin is not None and HYBRID in Path(origin).read_text() else set()
    for name in FLASH:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
    return frozenset(found)


def choose_backends(
    trainer: Trainer,
    *,
    device: str,
    packages: Collection[str],
    replaced: bool = False,
    layer_kind: LayerKind = ATTENTION_ONLY,
    experts: int = 0,
) -> Backends:
    """Resolve `auto` and refuse what cannot run; `packages`: `installed()` on the trainer's machines. `replaced`:
    numerics.mode brings layers in the place of plain torch's. `layer_kind`: of the model. `experts`: routed ones of a
    layer.

    Raises SlimxError naming the key and what is missing."""
    if replaced:
        packages = set(packages) - {"transformer_engine"}
    _check_offload(trainer, device, packages)
    _check_moments(trainer, device, packages)
    attention, why_attention = _attention(trainer.attention, device, packages)
    if replaced:
        why_attention = "attention and layers: those of numerics.mode"
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


def _attention(asked: Attention, device: str, packages: Collection[str]) -> tuple[Attention, str]:
    engine = has_engine(device, packages)
    if asked == "auto":
        if engine:
            return "auto", "attention: Transformer Engine chooses its fastest kernel for each shape"
        missing = "Transformer Engine is not installed" if device == "cuda" else "there is no CUDA"
        return "unfused", f"attention unfused: {missing}, so torch's scaled_dot_product_attention computes it"
    if asked == "unfused":
        whose = "Transformer Engine's" if engine else "torch's scaled_dot_product_attention"
        return "unfused", f"attention unfused: as configured ({whose})"
    if not engine:
        missing = "the package transformer_engine" if device == "cuda" else "CUDA"
        raise SlimxError(
            f"trainer.attention={asked} needs {missing}, which is not here; set trainer.attention=auto or install it",
            code="trainer.not_installed" if device == "cuda" else "trainer.no_cuda",
            about="trainer.attention",
        )
    if asked == "flash":
        flash = [name for name in FLASH if name in packages]
        if not flash:
            raise SlimxError(
                f"trainer.attention=flash needs one of the packages {', '.join(FLASH)}, and none is installed; install "
                "one, or set trainer.attention=fused or auto",
                code="trainer.not_installed",
                about="trainer.attention",
            )
        return asked, f"attention flash: as configured ({', '.join(flash)})"
    return asked, f"attention {asked}: as configured"


def _fusion(device: str, packages: Collection[str]) -> tuple[bool, str]:
    name = "gradient-accumulation fusion"
    if device != "cuda":
        return False, f"{name} off: there is no CUDA"
    if "fused_weight_gradient_mlp_cuda" in packages:
        return True, f"{name} on: apex's extension is installed"
    # megatron-core asks for apex's extension even where Transformer Engine's own layers would not need it.
    return False, f"{name} off: NVIDIA's apex (fused_weight_gradient_mlp_cuda) is not installed"


def _permute_fusion(device: str, packages: Collection[str]) -> tuple[bool, str]:
    """The unfused order of tokens is found by `masked_select`, for which the host waits in every MoE layer."""
    name = "permutation of tokens"
    if device != "cuda":
        return False, f"{name} unfused: there is no CUDA"
    if has_engine(device, packages):
        return True, f"{name} fused: Transformer Engine's kernels"
    return False, f"{name} unfused: Transformer Engine does not compute the layers"


def _overlap(trainer: Trainer, device: str, packages: Collection[str], experts: int) -> tuple[bool, str]:
    name, asked, engine = "reduction of gradients", trainer.overlap_grad_reduce, has_engine(device, packages)
    if asked and experts and not engine:
        # megatron-core's buckets count gradients, and sums of different buckets would meet where ranks differ in order.
        raise SlimxError(
            "trainer.overlap_grad_reduce needs Transformer Engine's layers for a model with experts, which are not "
            "taken here: an expert without tokens has no gradient in torch's, and its bucket would wait for it; leave "
            "the key out",
            code="trainer.overlap_grad_reduce",
            about="trainer.overlap_grad_reduce",
        )
    if asked is not None:
        return asked, f"{name} {'beside' if asked else 'after'} the backward pass: as configured"
    if trainer.data_size * trainer.context == 1:
        return False, f"{name} not needed: there is one data-parallel rank"
    if engine:
        return True, f"{name} beside the backward pass, by buckets"
    return False, f"{name} after the backward pass: Transformer Engine does not compute the layers"


def _gather(trainer: Trainer, overlap: bool) -> tuple[str, ...]:
    if not trainer.overlap_param_gather:
        return ()
    if not overlap:
        # megatron-core then has one bucket for all weights, and the first layer would wait for all of it.
        raise SlimxError(
            "trainer.overlap_param_gather needs the buckets of trainer.overlap_grad_reduce, which is off here; set it "
            "to true, or leave trainer.overlap_param_gather out",
            code="trainer.overlap_param_gather",
            about="trainer.overlap_param_gather",
        )
    return ("gather of weights beside the forward pass that follows, between the updates of a step: as configured",)


def _check_offload(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    if trainer.offload_activations and not has_engine(device, packages):
        missing = "the package transformer_engine" if device == "cuda" else "CUDA"
        raise SlimxError(
            f"trainer.offload_activations needs {missing}, which is not here; leave it out, and set trainer.recompute",
            code="trainer.not_installed" if device == "cuda" else "trainer.no_cuda",
            about="trainer.offload_activations",
        )


def _check_moments(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    if trainer.optimizer.moments_dtype != "float32" and not has_engine(device, packages):
        missing = "the package transformer_engine" if device == "cuda" else "CUDA"
        raise SlimxError(
            f"trainer.optimizer.moments_dtype={trainer.optimizer.moments_dtype} needs {missing}, which is not here; "
            "leave it out",
            code="trainer.not_installed" if device == "cuda" else "trainer.no_cuda",
            about="trainer.optimizer.moments_dtype",
        )


def _check_flex(trainer: Trainer, device: str, packages: Collection[str]) -> None:
    asked = f"trainer.moe.dispatcher=flex ({trainer.moe.flex_backend})"
    if device != "cuda":
        raise SlimxError(
            f"{asked} needs CUDA, which is not here; set trainer.moe.dispatcher=alltoall",
            code="trainer.no_cuda",
            about="trainer.moe.dispatcher",
        )
    needed, missing = "deep_ep", "the package deep_ep, which is not installed"
    if trainer.moe.flex_backend == "hybridep":
        needed, missing = HYBRID, f"{HYBRID} of DeepEP's branch hybrid-ep, which the deep_ep that is installed lacks"
    if needed not in packages:
        raise SlimxError(
            f"{asked} needs {missing}; install it or set trainer.moe.dispatcher=alltoall",
            code="trainer.not_installed",
            about="trainer.moe.dispatcher",
        )
    if trainer.expert * trainer.expert_tensor_size == 1:
        raise SlimxError(
            f"{asked} has nothing to dispatch with trainer.expert=1; raise it or set trainer.moe.dispatcher=alltoall",
            code="trainer.nothing_to_dispatch",
            about="trainer.moe.dispatcher",
        )
