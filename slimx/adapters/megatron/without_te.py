"""Repairs of megatron-core 0.19.2 where Transformer Engine is absent: names that its fallbacks leave unbound.

`install()` is called by `megatron_layers`, which supplies the layers, before a model is built. Each entry names the
line of upstream that needs it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install() -> None:
    """Apply every entry."""
    for entry in (_router, _latent_attention, _output_discarding_recomputation, _gradient_norm):
        entry()


def _router() -> None:
    """moe_utils.router_gating_linear takes te_general_gemm where Transformer Engine is installed; it has no CPU."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def _latent_attention() -> None:
    """MLASelfAttention and its absorbed form know the duplicated Linear, which the down projections are, only beside
    Transformer Engine."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    multi_latent_attention.Linear = absorbed_mla.Linear = Linear


def _output_discarding_recomputation() -> None:
    """CheckpointWithoutOutput, the recomputation of norms, activations and MLA's up-projection, takes its default
    fp8=False for a yes and asks Transformer Engine whether fp8 is on."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__ = functools.partialmethod(CheckpointWithoutOutput.__init__, fp8=None)


def _gradient_norm() -> None:
    """clip_grads falls back to a norm that reads every parameter's part back from the GPU: a wait for each of them."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    def norm(chunk_size: int, overflow: Any, lists: list[list[torch.Tensor]], *_: Any) -> tuple[torch.Tensor, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:  # else it is apex's
        clip_grads.l2_norm_impl = norm
