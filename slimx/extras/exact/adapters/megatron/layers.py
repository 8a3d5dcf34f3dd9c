"""Exact mode in the trainer: megatron-core's modules with the arithmetic of exact mode
(`slimx.extras.exact.operations`).

Each module replaces one of `slimx.adapters.megatron.layers` or megatron-core; names, shapes and checkpoint keys of
parameters stay the same. `install` replaces them in a decoder's spec. Written for megatron-core 0.19.2.

Under tensor parallelism, partial sums of row-parallel products stay in fp32. Every rank gathers them, adds them in the
order of the binary tree and rounds the sum once. A reduction by the communication library would add them in an order of
its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.moe_module_specs import _build_shared_experts
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from slimx.adapters.megatron.attention import (
    DownProjection,
    LatentAttention,
    PackedAttention,
    exchange_down_projections,
)
from slimx.adapters.megatron.builders import Builder, exchange, kind_of, submodules_of
from slimx.adapters.megatron.layers import (
    ColumnGroupedLinear,
    GroupedLinear,
    Norm,
    NormColumnParallelLinear,
    RowGroupedLinear,
    serve,
    served,
)
from slimx.data.packing import zigzag
from slimx.errors import SlimxError
from slimx.extras.exact import operations as exact
from slimx.extras.exact.adapters.megatron.router import ExactRouter
from slimx.extras.low_precision.megatron import CustomProduct

WITHOUT_ARITHMETIC = (
    IdentityFuncOp,
    IdentityOp,
    Linear,  # ExactLatentAttention, the only module that contains it, replaces it
    MLP.as_mlp_submodule,
    SelfAttention,
    SharedExpertMLP,
    TransformerLayer,
    get_bias_dropout_add,  # without bias and dropout it only adds the residual, as engines do
)
"""Modules that a spec may contain unchanged in exact mode, because they round nothing themselves; their submodules are
replaced or checked."""


def install(block: Any, *, leaves: int, rotary: exact.Rotary) -> None:
    """Replaces the modules in the decoder's spec `block`, a TransformerBlockSubmodules, with those of exact mode.

    `leaves`: number of equal parts (leaves) into which each row-parallel sum is cut. `rotary`: the model's rotary
    embedding, which core attention applies itself. Raises SlimxError if the spec contains a module without a
    counterpart in exact mode.
    """
    parts = {
        ColumnParallelLinear: ModuleSpec(ExactColumn),
        NormColumnParallelLinear: ModuleSpec(ExactNormColumn),
        RowParallelLinear: ModuleSpec(ExactRow, params={"leaves": leaves}),
        LatentAttention: ModuleSpec(ExactLatentAttention),
        Norm: ModuleSpec(ExactNorm),
        PackedAttention: ModuleSpec(ExactAttention, params={"rotary": rotary}),
        ColumnGroupedLinear: ModuleSpec(ExactColumnGrouped),
        RowGroupedLinear: ModuleSpec(ExactRowGrouped, params={"leaves": leaves}),
        TEGroupedMLP: ModuleSpec(ExactExperts),
        MoELayer: ModuleSpec(ExactMoe),
        _build_shared_experts: ModuleSpec(SharedExpertMLP),
    }
    for layer in block.layer_specs:
        exchange(layer, parts)
        _exchange_activations(layer)
        _check(layer, "a layer")
    block.layer_norm = ExactNorm


def _exchange_activations(builder: Builder) -> None:
    for value in submodules_of(builder).values():
        _exchange_activations(value)
    if isinstance(builder, ModuleSpec | partial):
        submodules = get_submodules(builder)
        if isinstance(submodules, MLPSubmodules | GroupedMLPSubmodules):
            submodules.activation_func = ExactSwiGLU


def _check(builder: Builder, role: str) -> None:
    """Raises SlimxError if `builder` or a submodule would build a module that rounds differently from exact mode.
    `role`: name of the builder's field in its spec, for the error."""
    kind = kind_of(builder)
    if kind not in WITHOUT_ARITHMETIC and kind is not ExactRouter and getattr(kind, "__module__", None) != __name__:
        raise SlimxError(
            f"numerics.mode=exact does not support {getattr(kind, '__name__', kind)}, which megatron-core uses as "
            f"{role} of this model; set numerics.mode=fast",
            code="exact.module",
            about=getattr(kind, "__name__", str(kind)),
        )
    for name, value in submodules_of(builder).items():
        _check(value, name)


# Weights with the values that engines have after an fp8 publication -------------------------------------------------


def compute_with(parameter: torch.nn.Parameter, rounded: torch.Tensor) -> None:
    """Makes layers multiply by `rounded`, which has the shape of `parameter`, instead of by `parameter`. `rounded`
    contains the values that engines have after an fp8 publication; in-place updates of `rounded` take effect at the
    next call. The gradient of `rounded` becomes the gradient of `parameter`, unchanged."""
    serve(parameter, lambda: _StraightThrough.apply(parameter, rounded))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, served: torch.Tensor) -> torch.Tensor:
        return served.view_as(served)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient, None


# Norms, linear layers, activation ----------------------------------------------------------------------------------


class ExactNorm(Norm):
    norm = staticmethod(exact.rms_norm)


class _Column(CustomProduct):
    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return exact.linear(x, served(weight), bias=bias)


class ExactColumn(_Column, ColumnParallelLinear):
    pass


class ExactNormColumn(_Column, NormColumnParallelLinear):
    norm = staticmethod(exact.rms_norm)


class ExactLinear(DownProjection):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return exact.linear(x, served(self.weight)), None


class _TreeSum(torch.autograd.Function):
    """Autograd function that adds the fp32 partial sums of all ranks as the upper levels of the binary tree. In the
    backward pass, the partial sum of each rank gets the full gradient, which is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return exact.combine_leaves(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient, None


class ExactRow(RowParallelLinear):
    """Row-parallel linear layer outside of experts. `leaves`: number of leaves, over all TP ranks, of the binary tree
    in which partial sums are added."""

    def __init__(self, *args: Any, leaves: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.leaves = leaves // self.tp_group.size()
        if self.bias is not None:
            raise SlimxError(
                "numerics.mode=exact does not support a bias in a row-parallel layer, which this model has; set "
                "numerics.mode=fast",
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.tp_group.size() == 1:
            return exact.linear(x, served(self.weight), self.leaves), None
        total = _TreeSum.apply(exact.linear_partial(x, served(self.weight), self.leaves), self.tp_group).to(x.dtype)
        if self.sequence_parallel:
            total = scatter_to_sequence_parallel_region(total, group=self.tp_group)
        return total, None


class _FirstRankOnly(torch.autograd.Function):
    """Autograd function that returns its input on the first rank of expert tensor parallelism and zeros on the others,
    because the dispatcher then sums over these ranks. In the backward pass, every rank gets the full gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return x.clone() if group.rank() == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient, None


class ExactSwiGLU(MegatronModule):
    """SwiGLU as the activation module of an MLP's spec (`use_te_activation_func`). It must be a module, because
    checkpoints save the state of each of an MLP's submodules."""

    def __init__(self, config: Any, **_: Any):
        super().__init__(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact.silu_and_mul(x)


# Attention ---------------------------------------------------------------------------------------------------------


class ExactAttention(PackedAttention):
    """Core attention that applies the rotary embedding `rotary` itself, with an fp32 table of cosines and sines. It
    rotates the last dimensions of queries and keys in latent attention, otherwise the first ones."""

    def __init__(self, config: Any, *args: Any, rotary: exact.Rotary, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.rotary = rotary
        self.rotates_last = config.multi_latent_attention
        self._table = torch.empty(0, 0)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if query.dim() == 4:
            query = query.squeeze(1)
        if key.dim() == 4:
            key = key.squeeze(1)
        bounds = packed_seq_params.cu_seqlens_q
        table, positions = self._table_and_positions((bounds[1:] - bounds[:-1]).tolist(), query.device)
        before = query.shape[-1] - self.rotary.dimensions if self.rotates_last else 0
        rotated_query, rotated_key = exact.rope(query[..., before:], key[..., before:], table, positions)
        if before:
            rotated_query = torch.cat((query[..., :before], rotated_query), dim=-1)
            rotated_key = torch.cat((key[..., :before], rotated_key), dim=-1)
        return super().forward(
            rotated_query, rotated_key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        )

    def _table_and_positions(self, lengths: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the table of cosines and sines, and the position of each of this rank's tokens in its sequence.
        `lengths`: number of tokens of each packed sequence."""
        if max(lengths) > len(self._table):
            self._table = self.rotary.table(1 << (max(lengths) - 1).bit_length()).to(device)
        rows = torch.from_numpy(zigzag(lengths, self.context.size(), self.context.rank()))
        sizes = torch.tensor(lengths)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return self._table, (rows - starts[rows]).to(device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        out = exact.attention(
            query, key, value, bounds, self.scale, rows=rows, window=self.window, sinks=self.softmax_offset
        )
        return out.flatten(1)


class ExactLatentAttention(LatentAttention):
    """Latent attention (MLA) whose core attention applies the rotary embedding. megatron-core's code only reorders the
    rotary pairs, because the angles passed to it are zero."""

    rotary_pos_emb: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        exchange_down_projections(self, ExactLinear)
        self.rotary_pos_emb = _ZeroRotary(self.rotary_pos_emb)
        magnitude = exact.yarn_lengthening(self.config.rotary_scaling_factor, self.config.mscale_all_dim)
        self.core_attention.scale = self.q_head_dim**-0.5 * magnitude * magnitude  # in SGLang's order of operations


class _ZeroRotary(torch.nn.Module):
    """Substitute for the rotary embedding `rotary`. It returns angles of the same shapes that are all zero, so that
    rotation changes no value."""

    def __init__(self, rotary: RotaryEmbedding):
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, *args: Any) -> int:
        return self.rotary.get_rotary_seq_len(*args)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, float]:
        angles = self.rotary(*args, **kwargs)
        return (torch.zeros_like(angles[0]), 1.0) if isinstance(angles, tuple) else torch.zeros_like(angles)


# Experts -----------------------------------------------------------------------------------------------------------


class _ExactGrouped(GroupedLinear):
    """Linear layers of all local experts, computed in one call. `local_leaves`: number of leaves of each sum that this
    rank computes; a leaf is one of the equal parts whose partial sums are added in a binary tree."""

    experts: list[ColumnParallelLinear | RowParallelLinear]

    local_leaves = 1

    def forward(self, x: torch.Tensor, tokens_per_expert: Any) -> tuple[torch.Tensor, None]:
        weights = [served(expert.weight) for expert in self.experts]
        return exact.grouped_linear(x, weights, list(tokens_per_expert), self.local_leaves), None


class ExactColumnGrouped(_ExactGrouped, ColumnGroupedLinear):
    pass


class ExactRowGrouped(_ExactGrouped, RowGroupedLinear):
    def __init__(self, *args: Any, leaves: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.local_leaves = leaves // self.groups.expt_tp.size()

    def forward(self, x: torch.Tensor, tokens_per_expert: Any) -> tuple[torch.Tensor, None]:
        group = self.groups.expt_tp
        if group.size() == 1:
            return super().forward(x, tokens_per_expert)
        weights = [served(expert.weight) for expert in self.experts]
        counts = list(tokens_per_expert)
        part = exact.grouped_linear(x, weights, counts, self.local_leaves, dtype=torch.float32)
        return _FirstRankOnly.apply(_TreeSum.apply(part, group).to(x.dtype), group), None


class ExactExperts(TEGroupedMLP):
    """Experts that return their outputs unweighted; `ExactMoe` applies the router's weights."""

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        counts = tokens_per_expert.tolist()
        inner, _ = self.linear_fc1(hidden, counts)
        return self.linear_fc2(exact.silu_and_mul(inner), counts)


class ExactMoe(MoELayer):
    """MoE layer that adds each token's weighted expert outputs in fp32, in ascending order of expert id."""

    _routed: tuple[torch.Tensor, torch.Tensor] | None = None
    """Router probabilities and routing map of the current call, stored by `preprocess` for `postprocess`; None at other
    times."""

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        self._routed = probs, routing_map
        return super().preprocess(hidden_states, probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Returns each token's weighted sum of expert outputs. `output` has one row per token and selected expert,
        sorted by expert and then by token."""
        assert self._routed is not None, "call preprocess before postprocess"
        probs, routing_map = self._routed
        self._routed = None
        dispatcher = self.token_dispatcher
        choices = self.config.moe_router_topk
        by_token = dispatcher.reversed_local_input_permutation_mapping.argsort(stable=True)
        rows = output[by_token].view(-1, choices, output.shape[-1])
        weights = probs[routing_map].view(-1, choices)
        shared = None if shared_expert_output is None else shared_expert_output.flatten(0, -2)
        return exact.moe_combine(rows, weights, shared).view(dispatcher.hidden_shape)
