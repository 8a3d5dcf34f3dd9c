"""Writes what Transformer Engine's own Python makes of the fields that `trainer.fp8` gives megatron-core.

python -m tests.extras.low_precision.engine_recipes
"""

from __future__ import annotations

import json
from typing import Any

from slimx.extras.low_precision.training import BLOCKWISE, Fp8
from slimx.trainer.process import prepare_process

SHAPE = (576, 704)
"""Shape of a tensor: of blocks of 128 whole ones and a half, down and across."""


def main() -> None:
    prepare_process("cuda", shares_layers=False, local=True, variables=BLOCKWISE.VARIABLES)
    from tests.integration import transformer_engine_stand

    transformer_engine_stand.install(fp32_scales=False)
    import torch
    from megatron.core.fp8_utils import get_fp8_align_size, get_fp8_recipe
    from megatron.core.transformer import TransformerConfig
    from transformer_engine.pytorch.quantization import RecipeState
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    from slimx.config.sections.trainer import Trainer
    from slimx.extras.low_precision.blocks import dequantize, quantize
    from slimx.extras.low_precision.recipes import RECIPES
    from slimx.reshard.kernels.record import RULE
    from slimx.trainer.device.backends import choose_backends

    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()

    def described(quantizer: Any) -> dict[str, Any]:
        rows, columns = (list(quantizer.get_scale_shape(SHAPE, columnwise=across)) for across in (False, True))
        fields = ("amax_epsilon", "force_pow_2_scales", "block_scaling_dim", "block_len")
        described_fields = {name: getattr(quantizer, name) for name in fields if hasattr(quantizer, name)}
        kind, dtype = type(quantizer).__name__, quantizer.dtype.name
        if "block_scaling_dim" in described_fields:
            described_fields["reads"] = reads(quantizer)
        return described_fields | {"kind": kind, "dtype": dtype, "scales": [rows, columns]}

    def reads(quantizer: Any) -> bool:
        """Returns True if codes and scales by slimx are the same numbers to Transformer Engine's own tensor."""
        square = quantizer.block_scaling_dim == 2
        block = (quantizer.block_len if square else 1, quantizer.block_len)
        codes, scales = quantize(values, RULE.TE, block)
        padded = torch.full(quantizer.get_scale_shape(SHAPE, columnwise=False), torch.nan)
        local_scales = scales if square else scales.T
        padded[: local_scales.shape[0], : local_scales.shape[1]] = local_scales
        tensor = Float8BlockwiseQTensorStorage(codes, padded, None, None, quantizer.dtype, quantizer, square)
        return torch.equal(tensor.dequantize(dtype=torch.float32), dequantize(codes, scales, block, torch.float32))

    out = {}
    for name in RECIPES:
        choose_backends(Trainer(fp8=name), device="cuda", packages={"transformer_engine"})
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **Fp8(RECIPES[name]).fields())
        recipe = get_fp8_recipe(config)
        made = {}
        for mode, slots in (("forward", ("input", "weight")), ("backward", ("gradient",))):
            state = RecipeState.create(recipe, mode=mode, num_quantizers=3, device=torch.device("cpu"))
            made |= dict(zip(slots, map(described, state.make_quantizers()), strict=False))
        out[name] = made | {"align": get_fp8_align_size(config.fp8_recipe)}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
