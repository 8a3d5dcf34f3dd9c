"""Where an engine's rank holds each tensor, and checksums of what it holds."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slimx.adapters.sglang.weights.layout import hf_layout
from slimx.adapters.sglang.weights.places import Destination, LocalPart, local_layout, local_sums, staged_sums
from slimx.layout.maps import Rect
from slimx.layout.parts import matrix
from slimx.layout.ranks import EngineSizes
from slimx.reshard.kernels.cpu import checksum_tensor
from tests.unit.adapters.engine_model import (
    DEEPSEEK,
    MINIMAX,
    QWEN3,
    ServerModel,
    checkpoint,
    engine_layout,
    expert_location,
    fill,
)

GLM = QWEN3 | {
    "architectures": ["Glm4MoeForCausalLM"],
    "intermediate_size": 32,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
}
LING = QWEN3 | {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "vocab_size": 120,
    "intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "use_qk_norm": True,
}

LAYOUTS = [
    (QWEN3, EngineSizes(), False),
    (QWEN3, EngineSizes(tensor=2), False),
    (QWEN3, EngineSizes(tensor=4, expert=2), False),
    (QWEN3, EngineSizes(tensor=4, expert=4, attention_data=2), False),
    (QWEN3, EngineSizes(tensor=4, expert=2, redundant=4), False),
    (DEEPSEEK, EngineSizes(), False),
    (DEEPSEEK, EngineSizes(tensor=4), False),
    (DEEPSEEK, EngineSizes(tensor=2, expert=2, attention_data=2), False),
    (DEEPSEEK, EngineSizes(tensor=4, expert=2), True),
    (DEEPSEEK, EngineSizes(tensor=2, expert=2, redundant=12), False),
    (GLM, EngineSizes(tensor=4, expert=2, attention_data=2), False),
    (GLM, EngineSizes(tensor=2), True),
    (LING, EngineSizes(), False),
    (LING, EngineSizes(tensor=4, expert=2, attention_data=2), False),
    (LING, EngineSizes(tensor=8, expert=2), False),
    (MINIMAX, EngineSizes(tensor=4, expert=2), False),
    (MINIMAX, EngineSizes(tensor=8, expert=8), False),
]


@pytest.mark.parametrize(
    ("hf", "sizes", "fused"), LAYOUTS, ids=lambda value: str(value) if not isinstance(value, dict) else ""
)
def test_the_modules_say_what_the_engine_tables_say(hf: dict, sizes: EngineSizes, fused: bool) -> None:
    """Two accounts of where everything is: SGLang's own modules, and the tables that publications are planned with."""
    weights = checkpoint(engine_layout(hf, sizes, fused=fused))
    location = expert_location(hf, sizes)
    found: set[str] = set()
    for rank in range(sizes.world):
        model = ServerModel(hf, sizes, rank, fused=fused)
        for name, parameter in model.named_parameters():
            fill(parameter.data, model.parts[name], weights)
        layout = hf_layout(model, location if sizes.redundant else None)
        parameters = dict(model.named_parameters())
        assert layout.uncovered == {}
        assert {name: place.shape for name, place in layout.places.items()} == {n: w.shape for n, w in weights.items()}
        for name in layout.local:
            whole = weights[name].view(matrix(weights[name].shape))
            for part in layout.places[name].parts:
                for r, view in zip(part.rects, part.views(parameters), strict=True):
                    assert torch.equal(view, whole[r.row : r.row + r.rows, r.col : r.col + r.cols]), name
        found |= set(layout.local)
        pieces = sum(len(part.rects) for part in model.parts.values())
        assert sum(len(part.rects) for name in layout.local for part in layout.places[name].parts) == pieces
        assert {n: place.shape for n, place in local_layout(model).places.items()} == {
            n: part.shape for n, part in model.parts.items()
        }
    assert found == set(weights)


def test_experts_are_found_where_balancing_put_them() -> None:
    sizes = EngineSizes(tensor=2, expert=2)
    model, moved = ServerModel(QWEN3, sizes, 1), expert_location(QWEN3, sizes)
    moved.physical_to_logical_map_cpu[1] = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])
    places = hf_layout(model, moved).places
    parameter = model.get_parameter("model.layers.1.mlp.experts.w2_weight")
    for slot, expert in enumerate((3, 2, 1, 0)):
        (place,) = places[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].parts
        assert torch.equal(*place.views(dict(model.named_parameters())), parameter[slot])
    assert places["model.layers.1.mlp.experts.4.down_proj.weight"].parts == []


def test_the_order_of_gate_and_up_is_read_from_the_kernel() -> None:
    model = ServerModel(QWEN3, EngineSizes())
    model.get_submodule("model.layers.0.mlp.experts").quant_method.load_up_proj_weight_first = True
    (part,) = hf_layout(model).places["model.layers.0.mlp.experts.2.up_proj.weight"].parts
    parameters = dict(model.named_parameters())
    assert torch.equal(*part.views(parameters), parameters["model.layers.0.mlp.experts.w13_weight"][2, :8])


def test_key_value_heads_that_ranks_share() -> None:
    """4 ranks, 2 KV heads: two ranks hold the same, which no table of slimx plans but any checkpoint loads."""
    model = nn.Module()
    model.self_attn = nn.Module()
    model.self_attn.qkv_proj = owner = nn.Module()
    owner.weight = nn.Parameter(torch.randn(4 * 4, 8))
    sizes = {"q_proj_shard_size": 8, "kv_proj_shard_size": 4, "v_proj_shard_size": 4, "head_size": 4, "v_head_size": 4}
    group = SimpleNamespace(rank_in_group=3)
    heads = {"total_num_heads": 8, "total_num_kv_heads": 2, "num_kv_head_replicas": 2}
    for name, value in (sizes | heads | {"tp_group": group, "kv_tp_group": group}).items():
        setattr(owner, name, value)
    layer = nn.Module()
    layer.layer = model
    places = hf_layout(layer).places
    assert places["layer.self_attn.k_proj.weight"].shape == (8, 8)
    assert places["layer.self_attn.k_proj.weight"].parts[0].rects == (Rect(0, 4, 0, 4, 8, 8, 0),)
    assert places["layer.self_attn.q_proj.weight"].parts[0].rects == (Rect(0, 24, 0, 8, 8, 0, 0),)


def test_parameters_without_a_row_are_reported_and_never_skipped() -> None:
    model = ServerModel(QWEN3, EngineSizes())
    layer = model.get_submodule("model.layers.0")
    layer.mlp.shared_expert = nn.Linear(3, 3, bias=False)
    layer.mlp.experts.hidden_size = 32
    layer.self_attn.qkv_proj.v_proj_shard_size = 12
    layer.self_attn.o_proj.weight = nn.Parameter(torch.randn(32, 16).T)
    del layer.self_attn.qkv_proj.kv_tp_group
    layer.mlp.gate.weight = nn.Parameter(torch.randn(8, 16))
    why = hf_layout(model).uncovered
    assert {name.removeprefix("model.layers.0."): text.partition(" ")[0] for name, text in why.items()} == {
        "mlp.experts.w13_weight": "shape",
        "mlp.experts.w2_weight": "shape",
        "mlp.shared_expert.weight": "no",
        "self_attn.o_proj.weight": "strides",
        "self_attn.qkv_proj.weight": "'Module'",
    }
    layer.self_attn.qkv_proj.kv_tp_group = None
    assert "not cover" in hf_layout(model).uncovered["model.layers.0.self_attn.qkv_proj.weight"]
    assert list(local_layout(model).uncovered) == ["model.layers.0.self_attn.o_proj.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_is_the_same_in_the_tensor_and_in_the_parameter(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    for _ in range(60):
        shape = (rng.randint(1, 9),) if rng.random() < 0.3 else (rng.randint(1, 9), rng.randint(1, 9))
        rows, cols = matrix(shape)
        tensor = torch.randint(0, 255, shape).to(dtype)
        row, col = rng.randrange(rows), rng.randrange(cols)
        height, width = rng.randint(0, rows - row), rng.randint(1, cols - col)
        parameter = torch.zeros(2, height + 1, cols + 2, dtype=dtype)
        copies = [
            LocalPart("p", tuple(parameter.shape), (Rect(0, row, col, height, width, top, left),))
            for top, left in ((0, 1), (height + 1, 0))
        ]
        places = {"t": Destination(dtype, shape, copies)}
        for part in copies:
            (view,) = part.views({"p": parameter})
            view.copy_(tensor.view(rows, cols)[row : row + height, col : col + width])
        whole, share = staged_sums({"t": tensor}, places)["t"]
        assert whole == checksum_tensor(tensor)
        assert local_sums(places, ["t"], {"p": parameter}) == {"t": {share}}
        if height:
            (spot,) = copies[rng.randrange(2)].views({"p": parameter})
            spot[rng.randrange(height), rng.randrange(width)] += 1
            assert local_sums(places, ["t"], {"p": parameter})["t"] != {share}
        for other in ({}, {"p": parameter[0]}, {"p": parameter.transpose(0, 1)}, {"p": parameter.to(torch.float64)}):
            assert local_sums(places, ["t"], other)["t"] == {None}


@pytest.mark.parametrize("last", [2, 3], ids=["rows are left", "to the end"])
def test_shares_of_sections_are_equal_in_the_tensor_and_its_place(last: int) -> None:
    """A convolution [9, 1, 4] of which a rank holds rows 1 to 2, 4, and 6 or 6 and on, as one parameter."""
    tensor, runs = torch.randint(0, 255, (9, 1, 4), dtype=torch.uint8), ((1, 2), (4, 1), (6, last))
    rows = [row + k for row, count in runs for k in range(count)]
    parameter, starts = tensor[rows].clone(), (0, 2, 3)
    rects = tuple(Rect(0, row, 0, count, 4, at, 0) for (row, count), at in zip(runs, starts, strict=True))
    places = {"t": Destination(tensor.dtype, (9, 1, 4), [LocalPart("p", tuple(parameter.shape), rects)])}
    whole, share = staged_sums({"t": tensor}, places)["t"]
    assert whole == checksum_tensor(tensor)
    assert local_sums(places, ["t"], {"p": parameter}) == {"t": {share}}
    for at in range(len(rows)):
        wrong = parameter.clone()
        wrong[at] += 1
        assert local_sums(places, ["t"], {"p": wrong})["t"] != {share}
    swapped = parameter[[2, 0, 1, *range(3, len(rows))]]
    assert local_sums(places, ["t"], {"p": swapped})["t"] != {share}
