"""Transformer Engine's Python makes blocks and rule of `trainer.fp8` that slimx rounds by."""

from __future__ import annotations

from typing import Any

import pytest

from slimx.extras.low_precision.recipes import RECIPES
from slimx.extras.low_precision.training import BLOCKWISE, Fp8
from slimx.trainer.process import prepare_process
from tests.function_call import call_in_process
from tests.needed import missing

pytestmark = pytest.mark.slow("needs .venv/transformer-engine, imports the whole of it")

SHAPE = (576, 704)
"""Shape of a tensor: of blocks of 128 whole ones and a half, down and across."""


def engine_recipes() -> dict[str, Any]:
    """Returns what Transformer Engine's own Python makes of the fields that `trainer.fp8` gives megatron-core."""
    prepare_process("cuda", shares_layers=False, local=True, variables=BLOCKWISE.VARIABLES)
    from tests.integration import transformer_engine_stand  # which imports torch

    transformer_engine_stand.install(fp32_scales=False)
    import torch
    from megatron.core.fp8_utils import get_fp8_align_size, get_fp8_recipe
    from megatron.core.transformer import TransformerConfig
    from transformer_engine.pytorch.quantization import RecipeState
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    from slimx.config.sections.trainer import Trainer
    from slimx.extras.low_precision.blocks import dequantize, quantize
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
    return out


def test_quantizers_have_the_blocks_and_the_rule_that_slimx_rounds_by() -> None:
    from tests.integration import transformer_engine_stand

    if not transformer_engine_stand.PACKAGE.is_dir():
        missing(f"needs {transformer_engine_stand.PACKAGE}: `make .venv/transformer-engine` installs it")
    made = call_in_process(engine_recipes)
    assert made.keys() == RECIPES.keys()
    for name, slots in made.items():
        assert Fp8.TOKENS % slots.pop("align") == 0
        assert {slot["dtype"] for slot in slots.values()} == {"kFloat8E4M3"}
        recipe = RECIPES[name]
        for what, slot in slots.items():
            block = recipe.weight if what == "weight" else recipe.vector
            # Scales by rows and by columns, padded for the product's kernel. A smaller last block has a scale as well.
            rows, cols = SHAPE
            if name == "mxfp8":
                assert (slot["kind"], recipe.rule, block) == ("MXFP8Quantizer", "mxfp8", (1, 32))
                assert slot["scales"] == [[640, 24], [20, 768]]
                continue
            # The rule te: 448 / amax, no least amax, no powers of two.
            assert (slot["kind"], recipe.rule) == ("Float8BlockQuantizer", "te")
            assert (slot["amax_epsilon"], slot["force_pow_2_scales"], slot["block_len"]) == (0.0, False, block[1])
            assert slot["block_scaling_dim"] == (2 if block == (128, 128) else 1)
            assert slot["scales"] == ([[5, 8], [6, 8]] if block == (128, 128) else [[6, rows], [5, cols]])
            assert slot["reads"]
