"""Exact mode in the trainer: megatron-core's modules with the operations of the contract.

The modules are those of `slimx.adapters.megatron.layers` and megatron-core with other arithmetic: names, shapes and
checkpoint keys of parameters stay. `install` puts them into a layer's spec. Written for megatron-core 0.19.2.

Tensor parallelism: partial sums of row-parallel products stay fp32, every rank gathers them and adds them in the order
of the tree, and the sum is rounded once. A reduction by the communication library would add in its own order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
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
from slimx.extras.low_precision.megatron import OwnProduct

WITHOUT_ARITHMETIC = (
    IdentityFuncOp,
    IdentityOp,
    Linear,  # exchanged by ExactLatentAttention, the one that has it
    MLP.as_mlp_submodule,
    SelfAttention,
    SharedExpertMLP,
    TransformerLayer,
    get_bias_dropout_add,  # without bias and dropout the residual's sum, as engines add it
)
"""Modules that a spec may name besides those here: they leave all rounding to their own parts."""


def install(block: Any, *, leaves: int, rotary: exact.Rotary) -> None:
    """Have the layers of a decoder's spec (TransformerBlockSubmodules) built for exact mode.

    `leaves`: of row-parallel sums. `rotary`: the rotary embedding, which core attention applies itself. Raises
    SlimxError for a spec with any module that has no counterpart here.
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


def _check(builder: Builder, place: str) -> None:
    """Refuse what would round by a rule of its own. `place`: of the builder in a layer."""
    kind = kind_of(builder)
    if kind not in WITHOUT_ARITHMETIC and kind is not ExactRouter and getattr(kind, "__module__", None) != __name__:
        raise SlimxError(
            f"numerics.mode exact does not know {getattr(kind, '__name__', kind)}, which is {place} of this model in "
            "megatron-core; set numerics.mode=fast",
            code="exact.module",
            about=getattr(kind, "__name__", str(kind)),
        )
    for name, value in submodules_of(builder).items():
        _check(value, name)


# Weights that engines hold rounded ---------------------------------------------------------------------------------


def compute_with(parameter: torch.nn.Parameter, rounded: torch.Tensor) -> None:
    """Have the layers here multiply by `rounded` [as parameter] in the place of `parameter`, from its present memory:
    what engines compute with where weights are published in fp8. The gradient is that of `rounded`, as it is."""
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


class _Column(OwnProduct):
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
    """fp32 partial sums of all ranks, added as the upper levels of the tree; each rank's part gets the whole gradient,
    which is the same on all."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return exact.combine_leaves(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient, None


class ExactRow(RowParallelLinear):
    """A row-parallel layer outside of experts."""

    def __init__(self, *args: Any, leaves: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.leaves = leaves // self.tp_group.size()
        if self.bias is not None:
            raise SlimxError(
                "a bias of a row-parallel layer has no place in exact mode; set numerics.mode=fast",
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.tp_group.size() == 1:
            return exact.linear(x, served(self.weight), self.leaves), None
        total = _TreeSum.apply(exact.linear_partial(x, served(self.weight), self.leaves), self.tp_group).to(x.dtype)
        if self.sequence_parallel:
            total = scatter_to_sequence_parallel_region(total, group=self.tp_group)
        return total, None


class _OfFirstRank(torch.autograd.Function):
    """The dispatcher adds the ranks of expert tensor parallelism, so all but the first give zeros. In the backward pass
    it brings every rank the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return x.clone() if group.rank() == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient, None


class ExactSwiGLU(MegatronModule):
    """The activation of a spec (`use_te_activation_func`); checkpoints ask every part of an MLP for its state."""

    def __init__(self, config: Any, **_: Any):
        super().__init__(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact.silu_and_mul(x)


# Attention ---------------------------------------------------------------------------------------------------------


class ExactAttention(PackedAttention):
    """Core attention, which turns queries and keys itself by an fp32 table of `rotary`: of latent attention the last
    dimensions, else the first."""

    def __init__(self, config: Any, *args: Any, rotary: exact.Rotary, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.rotary = rotary
        self.turns_last = config.multi_latent_attention
        self._table = torch.empty(0, 0)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        query, key = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key))
        bounds = packed_seq_params.cu_seqlens_q
        turns = self._turns((bounds[1:] - bounds[:-1]).tolist(), query)
        before = query.shape[-1] - self.rotary.dimensions if self.turns_last else 0
        first, last = (query[..., :before], key[..., :before]), (query[..., before:], key[..., before:])
        query, key = exact.rope(*last, *turns)
        if before:
            query, key = (torch.cat(parts, dim=-1) for parts in zip(first, (query, key), strict=True))
        return super().forward(query, key, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _turns(self, lengths: list[int], query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The table, and the positions of this rank's tokens in their sequences."""
        if max(lengths) > len(self._table):
            self._table = self.rotary.table(1 << (max(lengths) - 1).bit_length()).to(query.device)
        places = torch.from_numpy(zigzag(lengths, self.context.size(), self.context.rank()))
        sizes = torch.tensor(lengths)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return self._table, (places - starts[places]).to(query.device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        how = {"rows": rows, "window": self.window, "sinks": self.softmax_offset}
        return exact.attention(query, key, value, bounds, self.scale, **how).flatten(1)


class ExactLatentAttention(LatentAttention):
    """Core attention rotates; upstream only takes the pairs apart."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        exchange_down_projections(self, ExactLinear)
        self.rotary_pos_emb = _NoTurn(self.rotary_pos_emb)
        longer = exact.yarn_lengthening(self.config.rotary_scaling_factor, self.config.mscale_all_dim)
        self.core_attention.scale = self.q_head_dim**-0.5 * longer * longer  # in SGLang's order of operations


class _NoTurn(torch.nn.Module):
    """The angles of `rotary`, all zero: a rotation by them is exact."""

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, *args: Any) -> int:
        return self.rotary.get_rotary_seq_len(*args)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, float]:
        angles = self.rotary(*args, **kwargs)
        return (torch.zeros_like(angles[0]), 1.0) if isinstance(angles, tuple) else torch.zeros_like(angles)


# Experts -----------------------------------------------------------------------------------------------------------


class _Grouped:
    """The products of all local experts in one call."""

    own_leaves = 1

    def forward(self, x: torch.Tensor, tokens_per_expert: Any) -> tuple[torch.Tensor, None]:
        weights = [served(expert.weight) for expert in self.experts]
        return exact.grouped_linear(x, weights, list(tokens_per_expert), self.own_leaves), None


class ExactColumnGrouped(_Grouped, ColumnGroupedLinear):
    pass


class ExactRowGrouped(_Grouped, RowGroupedLinear):
    def __init__(self, *args: Any, leaves: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.own_leaves = leaves // self.groups.expt_tp.size()

    def forward(self, x: torch.Tensor, tokens_per_expert: Any) -> tuple[torch.Tensor, None]:
        group = self.groups.expt_tp
        if group.size() == 1:
            return super().forward(x, tokens_per_expert)
        weights, counts = [served(expert.weight) for expert in self.experts], list(tokens_per_expert)
        part = exact.grouped_linear(x, weights, counts, self.own_leaves, dtype=torch.float32)
        return _OfFirstRank.apply(_TreeSum.apply(part, group).to(x.dtype), group), None


class ExactExperts(TEGroupedMLP):
    """Outputs of experts without the router's weights, which meet them in `ExactMoe`."""

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        counts = tokens_per_expert.tolist()
        inner, _ = self.linear_fc1(hidden, counts)
        return self.linear_fc2(exact.silu_and_mul(inner), counts)


class ExactMoe(MoELayer):
    """Adds a token's experts in ascending order of id, in fp32."""

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        self._routed = probs, routing_map
        return super().preprocess(hidden_states, probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Combine `output`, which has one row for each token and expert, sorted by expert and then token."""
        probs, routing_map = self._routed
        self._routed = None
        dispatcher, choices = self.token_dispatcher, self.config.moe_router_topk
        by_token = dispatcher.reversed_local_input_permutation_mapping.argsort(stable=True)
        rows = output[by_token].view(-1, choices, output.shape[-1])
        weights = probs[routing_map].view(-1, choices)
        shared = None if shared_expert_output is None else shared_expert_output.flatten(0, -2)
        return exact.moe_combine(rows, weights, shared).view(dispatcher.hidden_shape)
