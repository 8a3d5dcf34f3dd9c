"""A trainer in exact mode computes with the weights that its engines have after a publication in blocks of fp8."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slimx.extras.exact.adapters.sglang.blocks import expert_weights
from slimx.extras.exact.served_weights import ServedWeights
from slimx.extras.families import deepseek_v3
from slimx.extras.low_precision import blocks
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import Sizes
from slimx.reshard.kernels.record import RULE
from tests import reshard_reference as reference
from tests.refusals import refused
from tests.unit.layout.layout_stand import MODELS, Model, checkpoint, trainer_shards
from tests.unit.reshard.packer_stand import DTYPES, WIDE, Values, one_thread


@pytest.fixture(autouse=True)
def single_threaded():
    with one_thread():
        yield


@pytest.mark.parametrize(("rule", "dtype"), [("ieee", "bfloat16"), ("te", "float32"), ("ue8m0", "bfloat16")])
def test_every_rank_rounds_its_shards_as_the_whole_tensors_are_rounded(rule: Any, dtype: Any) -> None:
    model, sizes, how = (
        Model(WIDE, deepseek_v3.weight_table(WIDE)),
        Sizes(tensor=2, data=2, expert=2),
        quantization(rule),
    )
    whole, by_rank = checkpoint(model), trainer_shards(model, sizes)
    count = 1 + max(int(t.max()) for t in whole.values())
    values, rounded = Values(count), torch.zeros(count, dtype=DTYPES[dtype])
    quantized = {name for e in model.table.entries() if e.row.quantized for name in e.sources}
    for name in quantized:
        codes, scales = reference.quantize(values.dress(whole, DTYPES[dtype])[name], RULE[rule.upper()], how.block)
        rounded[whole[name]] = reference.dequantize(codes, scales, how.block, DTYPES[dtype])
    for rank, numbers in enumerate(by_rank):
        parameters = values.dress(numbers, DTYPES[dtype])
        parts = MegatronLayout(model.table, sizes).parts_of(rank)
        served = ServedWeights(parts, parameters, how, dtype)
        assert served.values.keys() == {part.name for part in parts if part.quantized}
        for factor in (1.0, 2.0):  # all rules scale by powers of two
            for name in served.values:
                parameters[name].copy_(values.dress(numbers, DTYPES[dtype])[name] * factor)
            served.refresh()
            for name, found in served.values.items():
                assert torch.equal(found, rounded[numbers[name]] * factor), (rank, name)


def test_a_shard_that_a_block_would_cross_is_refused_by_name() -> None:
    model, sizes = MODELS["deepseek"], Sizes(tensor=2)
    parameters = Values().dress(trainer_shards(model, sizes)[0], torch.bfloat16)
    with refused("plan.blocks", about="model.layers.0.mlp.up_proj.weight"):
        ServedWeights(MegatronLayout(model.table, sizes).parts_of(0), parameters, quantization("ieee"), "bfloat16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_tensor_is_dequantized_as_the_specification_does_it(dtype: torch.dtype) -> None:
    x = torch.randn(100, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = reference.quantize(x, RULE.IEEE, (32, 64))
    found = blocks.dequantize(codes.view(torch.float8_e4m3fn), scales, (32, 64), dtype)
    assert torch.equal(found, reference.dequantize(codes, scales, (32, 64), dtype))
    with refused("kernel.scales", about="scales"):
        blocks.dequantize(codes, scales[:3], (32, 64), dtype)


def test_experts_with_tokens_are_dequantized_from_their_current_codes() -> None:
    x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = [reference.quantize(matrix, RULE.IEEE, (32, 64)) for matrix in x]
    codes, scales = (torch.stack(parts) for parts in zip(*made, strict=True))
    expected = [reference.dequantize(*parts, (32, 64), torch.bfloat16) for parts in made]
    method = SimpleNamespace(weight_block_size=[32, 64])
    layer = SimpleNamespace(w2=codes.view(torch.float8_e4m3fn), w2_scale_inv=scales, quant_method=method)
    found = expert_weights(layer, "w2", [2, 0, 1], torch.bfloat16)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    scales *= 2  # as a publication writes in place
    assert torch.equal(expert_weights(layer, "w2", [0, 1, 0], torch.bfloat16)[1], expected[1] * 2)
    assert len(expert_weights(layer, "w2", [0, 0, 0], torch.bfloat16)) == 3, "a rank whose experts no token chooses"
