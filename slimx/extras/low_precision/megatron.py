"""fp8 linear layers for megatron-core without Transformer Engine, on the CPU. The layers round as publications do.

Each module replaces one of `slimx.adapters.megatron.layers` and computes its matrix products with `products`; names,
shapes and checkpoint keys of parameters stay the same. On GPUs, Transformer Engine's layers are used instead
(`slimx.trainer.model.transformer`). Written for megatron-core 0.19.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from slimx.adapters.megatron.attention import DownProjection, LatentAttention, exchange_down_projections
from slimx.adapters.megatron.builders import exchange
from slimx.adapters.megatron.layers import (
    ColumnGroupedLinear,
    GroupedLinear,
    NormColumnParallelLinear,
    RowGroupedLinear,
)
from slimx.extras.low_precision.products import linear
from slimx.extras.low_precision.recipes import Recipe


def install(block: Any, recipe: Recipe) -> None:
    """Replaces the linear layers in the decoder's spec `block`, a TransformerBlockSubmodules, with layers that compute
    in fp8 by `recipe`. These are the layers that Transformer Engine would compute in fp8: all except embedding, router
    and output layer."""
    kinds = {
        LatentAttention: Fp8LatentAttention,
        ColumnParallelLinear: Fp8Column,
        NormColumnParallelLinear: Fp8NormColumn,
        RowParallelLinear: Fp8Row,
        ColumnGroupedLinear: Fp8ColumnGrouped,
        RowGroupedLinear: Fp8RowGrouped,
    }
    parts = {plain: ModuleSpec(kind, params={"recipe": recipe}) for plain, kind in kinds.items()}
    for layer in block.layer_specs:
        exchange(layer, parts)


class CustomProduct:
    """Mixin for megatron-core's tensor-parallel linear layers that replaces their matrix product with `product`."""

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x [..., in] times the transpose of weight [out, in], plus bias [out]. The result is [..., out]."""
        raise NotImplementedError

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        sequence_parallel: bool = False,
        allreduce_dgrad: bool = False,
        tp_group: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return self.product(input, weight, bias)


class _Fp8Product(CustomProduct):
    """Mixin for linear layers without bias whose matrix product is computed in fp8 by `recipe`."""

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.recipe = recipe

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None:
            raise NotImplementedError("an fp8 linear layer does not support a bias; remove trainer.fp8")
        return linear(x, weight, self.recipe)


class Fp8Column(_Fp8Product, ColumnParallelLinear):
    pass


class Fp8NormColumn(_Fp8Product, NormColumnParallelLinear):
    pass


class Fp8Row(_Fp8Product, RowParallelLinear):
    pass


class Fp8Down(DownProjection):
    def __init__(self, whole: Linear, recipe: Recipe):
        super().__init__(whole)
        self.recipe = recipe

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return linear(x, self.weight, self.recipe), None


class Fp8LatentAttention(LatentAttention):
    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any):
        super().__init__(*args, **kwargs)
        exchange_down_projections(self, partial(Fp8Down, recipe=recipe))


class _Fp8Grouped(GroupedLinear):
    """Grouped linear layers of this rank's experts, computed in fp8 by `recipe`."""

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any):
        self.options = {**self.options, "recipe": recipe}
        super().__init__(*args, **kwargs)


class Fp8ColumnGrouped(_Fp8Grouped, ColumnGroupedLinear):
    layer = Fp8Column


class Fp8RowGrouped(_Fp8Grouped, RowGroupedLinear):
    layer = Fp8Row
