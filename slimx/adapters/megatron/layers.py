"""Plain-torch layers with the interface of Transformer Engine's, for hosts without Transformer Engine (CPU, or a GPU
without it) and for layers that a numerics mode replaces.

Parameter names, shapes and checkpoint keys are those of the Transformer Engine layers that
`get_gpt_decoder_block_spec(config, use_transformer_engine=True)` selects, so one model definition, one weight table and
one checkpoint serve both. The arithmetic is that of `slimx.numerics`. Written for megatron-core 0.19.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import ClassVar

import torch
from megatron.core import optimizer
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig, mla_qk_norm_config
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slimx.adapters.megatron.attention import PackedAttention
from slimx.numerics.norm import rms_norm, zero_centered_rms_norm


def install(*, always: bool = False) -> bool:
    """Makes megatron.core build this module's layers if CUDA or Transformer Engine is missing, or if `always` is True;
    returns True if it did so. Also installs `Adam`, unless a FusedAdam of apex or Transformer Engine is available on a
    GPU."""
    if torch.cuda.is_available() and HAVE_TE and not always:
        return False
    repair_upstream()
    gpt_layer_specs.TESpecProvider = TorchSpecProvider
    gpt_layer_specs.TENorm = Norm
    # Sparse attention's spec and norms are resolved in these two modules.
    experimental_attention_variant_module_specs.TESpecProvider = TorchSpecProvider
    mla_qk_norm_config.get_backend = lambda _: TorchSpecProvider()
    if optimizer.USING_PYTORCH_OPTIMIZER or not torch.cuda.is_available():
        # torch's AdamW keeps one step count per parameter. The distributed optimizer can save that state but not load
        # it.
        optimizer.Adam = Adam
        optimizer.distrib_optimizer.Adam = Adam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        optimizer.distrib_optimizer.HAVE_APEX_OR_TE = True
        optimizer.distrib_optimizer.USING_APEX_OPTIMIZER = True
    return True


def serve(parameter: torch.nn.Parameter, value: Callable[[], torch.Tensor]) -> None:
    """Makes layers that read their weight through `served` use the result of `value` instead of `parameter`. `value` is
    called at each use and must return a tensor of the parameter's shape."""
    parameter.__dict__["served"] = value


def served(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the tensor by which a layer with weight `parameter` multiplies: the substitute registered with `serve`,
    or `parameter` itself."""
    value = getattr(parameter, "served", None)
    return parameter if value is None else value()


def _norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    """Creates a norm's weight [size], marked so that megatron-core sums its gradient over TP ranks under sequence
    parallelism."""
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.__dict__["sequence_parallel"] = config.sequence_parallel
    return weight


class Norm(torch.nn.Module):
    """RMSNorm with a `weight` [hidden]. If the configuration sets `layernorm_zero_centered_gamma`, the norm multiplies
    by 1 + weight."""

    norm = staticmethod(rms_norm)

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        if config.normalization != "RMSNorm":
            raise NotImplementedError(
                f"no plain-torch layer supports normalization {config.normalization}; set normalization to RMSNorm"
            )
        self.weight = _norm_weight(hidden_size, config)
        self.eps = eps
        if config.layernorm_zero_centered_gamma:
            self.norm = zero_centered_rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm followed by a column-parallel linear layer in one module, with parameters `layer_norm_weight` [hidden]
    and `weight`."""

    norm = staticmethod(rms_norm)

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(input_size, config)
        if config.layernorm_zero_centered_gamma:
            self.norm = zero_centered_rms_norm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().forward(self.norm(x, self.layer_norm_weight, self.config.layernorm_epsilon))


class GroupedLinear(torch.nn.Module):
    """One linear layer per local expert, with parameters `weight0`, `weight1`, ... and `bias0`, ... like Transformer
    Engine's GroupedLinear."""

    layer: type[ColumnParallelLinear | RowParallelLinear]
    axis: ClassVar[int]
    options: Mapping[str, object]
    experts: list[ColumnParallelLinear | RowParallelLinear]

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], object],
        pg_collection: ProcessGroupCollection,
        bias: bool = False,
        skip_bias_add: bool = True,
        **_: object,
    ):
        super().__init__()
        self.groups = pg_collection
        self.skip_bias_add = skip_bias_add
        experts = [
            self.layer(
                input_size,
                output_size,
                config=config,
                init_method=init_method,
                bias=bias,
                is_expert=True,
                skip_bias_add=True,
                tp_group=pg_collection.expt_tp,
                **self.options,
            )
            for _ in range(num_gemms)
        ]
        # Not registered as submodules: the parameters' names are weight0, weight1, ...
        self.__dict__["experts"] = experts
        for index, expert in enumerate(experts):
            self.register_parameter(f"weight{index}", expert.weight)
            if bias:
                # RowParallelLinear would sum the bias gradient over the TP ranks, which have other experts.
                expert.bias.sequence_parallel = False
                if self.axis == 1:
                    # The gradient norm counts unsplit tensors only on the first TP rank, but TP ranks may have
                    # different experts. The mark makes it count the bias on the first rank of those that share the
                    # expert.
                    expert.bias.tensor_model_parallel = pg_collection.expt_tp.rank() == 0
                self.register_parameter(f"bias{index}", expert.bias)

    def forward(
        self, x: torch.Tensor, tokens_per_expert: Iterable[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Applies each expert's linear layer to its tokens in `x` [tokens sorted by expert, input]. Returns the
        outputs, and the biases if the caller must add them (`skip_bias_add`), else None."""
        parts = x.split(list(tokens_per_expert))
        pairs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        if pairs[0][1] is None:
            return torch.cat([out for out, _ in pairs]), None
        if self.skip_bias_add:
            return torch.cat([out for out, _ in pairs]), [bias for _, bias in pairs]
        return torch.cat([out + bias for out, bias in pairs]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Returns sharded tensors under the checkpoint keys that Transformer Engine's layer uses: one tensor per layer
        with an expert axis, or one per expert if `metadata` sets `singleton_local_shards`."""
        assert metadata is not None
        count = len(self.experts)
        expert_group = self.groups.ep
        out: ShardedStateDict = {}
        for index, expert in enumerate(self.experts):
            global_index = expert_group.rank() * count + index
            if metadata.get("singleton_local_shards"):
                offsets = sharded_offsets
                key = f"{global_index}.{prefix}"
            else:
                offsets = (*sharded_offsets, (len(sharded_offsets), global_index, expert_group.size() * count))
                key = prefix
            state = {f"{index}.weight": expert.weight}
            split_axes = {f"{index}.weight": self.axis}
            if self.axis == 0:
                split_axes[f"{index}.bias"] = 0
            if expert.bias is not None:
                state[f"{index}.bias"] = expert.bias
            shards = make_sharded_tensors_for_checkpoint(
                state,
                "",
                split_axes,
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shards, f"{index}.", key)
            for name in state:
                shard = shards[name]
                shard.replica_id = (*shard.replica_id[:2], self.groups.expt_dp.rank())
                out[f"{prefix}{name.split('.')[1]}{index}"] = shard
        return out


class ColumnGroupedLinear(GroupedLinear):
    layer = ColumnParallelLinear
    axis = 0
    options = {"gather_output": False}


class RowGroupedLinear(GroupedLinear):
    layer = RowParallelLinear
    axis = 1
    options = {"input_is_parallel": True}


class TorchSpecProvider(BackendSpecProvider):
    """Implementation of megatron-core's backend interface: methods return the plain-torch class for each kind of layer,
    or state whether layers are fused."""

    def linear(self) -> type:
        return Linear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return PackedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial[TEGroupedMLP]:
        parts = GroupedMLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
        return partial(TEGroupedMLP, submodules=parts)

    def activation_func(self) -> None:
        return None


class Adam(torch.optim.Optimizer):
    """AdamW with the state layout of apex's and Transformer Engine's FusedAdam: one step count per parameter group, two
    moments per parameter."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: object,
    ):
        if not adam_w_mode:
            raise NotImplementedError("slimx's Adam does not support adam_w_mode=False; set adam_w_mode=True")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # megatron-core passes no closure
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            beta1, beta2 = group["betas"]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            grads = [p.grad for p in parameters]
            mean = [self.state[p]["exp_avg"] for p in parameters]
            square = [self.state[p]["exp_avg_sq"] for p in parameters]
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(mean, grads, 1 - beta1)
            torch._foreach_mul_(square, beta2)
            torch._foreach_addcmul_(square, grads, grads, value=1 - beta2)
            root = torch._foreach_div(square, 1 - beta2 ** group["step"])
            torch._foreach_sqrt_(root)
            torch._foreach_add_(root, group["eps"])
            torch._foreach_addcdiv_(parameters, mean, root, value=-group["lr"] / (1 - beta1 ** group["step"]))


def repair_upstream() -> None:
    """Patches code of megatron-core 0.19.2 that fails or is slow without Transformer Engine's layers. Each patch's
    docstring names the upstream function and its fault."""
    for repair in (_router, _latent_attention, _output_discarding_recomputation, _gradient_norm):
        repair()


def _router() -> None:
    """Makes moe_utils.router_gating_linear use torch's matrix product. Upstream uses te_general_gemm whenever
    Transformer Engine is installed, even on a CPU."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def _latent_attention() -> None:
    """Sets the name `Linear`, the class of MLA's down projections, in the two Python modules that define
    MLASelfAttention and its absorbed variant. Upstream defines the name there only if Transformer Engine is
    installed."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    multi_latent_attention.Linear = Linear
    absorbed_mla.Linear = Linear


def _output_discarding_recomputation() -> None:
    """Changes the default of CheckpointWithoutOutput's argument `fp8` from False to None. Upstream treats False as
    enabled and then queries Transformer Engine's fp8 state. The class recomputes norms, activations and MLA's up
    projection."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__ = functools.partialmethod(CheckpointWithoutOutput.__init__, fp8=None)


def _gradient_norm() -> None:
    """Replaces the fallback norm function of clip_grads with one whose result stays on the GPU. Upstream's function
    copies the norm of each parameter from the GPU separately and waits for each copy."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    def norm(
        chunk_size: int, overflow: object, lists: list[list[torch.Tensor]], *_: object
    ) -> tuple[torch.Tensor, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None

    # Not replaced if it is apex's or Transformer Engine's, which is fast.
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm
