"""Memory and rank maps of `slimx plan`, compared with the layouts and published formulas. For a comparison with real
trainers see tests/integration/test_plan_memory.py."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slimx.config.schema import Config
from slimx.config.sections.trainer import Recompute, Trainer
from slimx.extras.exact.served_weights import ServedWeights
from slimx.extras.families import deepseek_v3
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.extras.planner.memory.activations import Setting, layer_bytes
from slimx.extras.planner.memory.engine import kv_bytes
from slimx.extras.planner.memory.parameter_runs import Holdings, ParameterRun
from slimx.extras.planner.memory.pipeline import _layers, in_flight
from slimx.extras.planner.memory.state import Buffers, pinned
from slimx.extras.planner.memory.trainer import trainer_memory
from slimx.layout.megatron import MegatronLayout
from slimx.layout.ranks import EngineSizes, Sizes, coordinates
from slimx.layout.table import Table
from slimx.models.families import qwen3_moe, read_model
from slimx.models.layer_kind import LayerKind, LayerParts
from tests.published import DEEPSEEK_V3, QWEN3_30B

MLP, MOE = LayerParts("attention", "dense"), LayerParts("attention", "experts")
QWEN = QWEN3_30B | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "vocab_size": 640,
    "tie_word_embeddings": True,
}
DEEPSEEK = DEEPSEEK_V3 | {
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "vocab_size": 640,
}
TABLES = {"qwen": qwen3_moe.weight_table(QWEN), "deepseek": deepseek_v3.weight_table(DEEPSEEK, mtp=1)}
LAYOUTS = [
    Sizes(),
    Sizes(tensor=2, data=2, expert=2),
    Sizes(tensor=2, data=2, expert=2, expert_tensor=2),
    Sizes(pipeline=2, virtual=2, data=2, expert=2),
    Sizes(pipeline=2, context=2, expert=2, split=(1, 3)),
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_every_rank_holds_what_its_layout_says(name: str, sizes: Sizes):
    layout = MegatronLayout(TABLES[name], sizes)
    for rank in range(sizes.world):
        parts_by_size = Counter((part.dtype or "bfloat16", math.prod(part.shape)) for part in layout.parts_of(rank))
        counted: Counter[tuple[str, int]] = Counter()
        for run in Holdings(TABLES[name], "bfloat16").runs(sizes, rank):
            counted[run.dtype, run.elements] += run.count
        assert counted == parts_by_size


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_shares_of_the_optimizer_hold_every_parameter_once(name: str, sizes: Sizes):
    """Sums over all ranks: a parameter counts once per tensor-parallel rank and stage that holds it, never per data
    rank."""
    table, trainer = TABLES[name], Trainer()
    states = expected = 0
    for rank in range(sizes.world):
        runs = Holdings(table, "bfloat16").runs(sizes, rank)
        states += Buffers(runs, trainer, sizes).state(rank).optimizer
        place = coordinates(rank, sizes)
        for run in runs:
            first = place.expert_data == 0 if run.expert else place.data == place.context == 0
            expected += 12 * run.elements * run.count * (first and run.parameter)
    assert states == expected


@pytest.mark.parametrize(("dense", "kinds"), [(1, 3), (2, 4), (3, 4)])
def test_the_fullest_rank_is_of_a_stage_unlike_those_before_it(dense: int, kinds: int):
    """Uses a model that begins with dense layers, which hold less than those with experts."""
    table = deepseek_v3.weight_table(DEEPSEEK | {"num_hidden_layers": 8, "first_k_dense_replace": dense}, mtp=0)
    parameters, sizes = Holdings(table, "bfloat16"), Sizes(pipeline=8)
    elements = [parameters.elements(sizes, rank) for rank in range(sizes.world)]
    unlike = parameters.unlike_stages(sizes)
    assert {elements[stage] for stage in unlike} == {*elements} and len(unlike) == kinds


def test_bytes_per_parameter_are_those_of_megatron_lm():
    """Compares with Megatron-LM's theoretical_memory_usage.py: 18 bytes of a bf16 model, 6 + 12 / DP with the
    distributed optimizer."""
    sizes = Sizes(data=4)
    wide = qwen3_moe.weight_table(QWEN | {"hidden_size": 512})
    runs = Holdings(wide, "bfloat16").runs(sizes, 0)
    count = sum(run.elements * run.count for run in runs)
    for distributed, nbytes in ((False, 18), (True, 6 + 12 / 4)):
        state = Buffers(runs, Trainer(world_size=4, distributed_optimizer=distributed), sizes).state(0)
        found = state.weights + state.gradients + state.optimizer
        assert found == pytest.approx(nbytes * count, rel=1e-3 if distributed else 1e-9)


def test_parameters_are_as_many_as_megatron_lm_reports():
    """Adds routers and the norms of queries and keys, which its report (same file) leaves out."""
    qwen, v3 = QWEN3_30B, DEEPSEEK_V3
    hidden, layers, experts = qwen["hidden_size"], qwen["num_hidden_layers"], qwen["num_experts"]
    heads = qwen["num_attention_heads"] * qwen["head_dim"]
    attention = 2 * hidden * heads * (1 + qwen["num_key_value_heads"] / qwen["num_attention_heads"])
    mlp = 3 * hidden * qwen["moe_intermediate_size"] * experts + hidden * experts
    reported = layers * (attention + mlp + 2 * hidden + 2 * qwen["head_dim"]) + hidden + 2 * hidden * qwen["vocab_size"]
    assert elements(qwen3_moe.weight_table(qwen)) == reported

    hidden, heads, rope = v3["hidden_size"], v3["num_attention_heads"], v3["qk_rope_head_dim"]
    query, latent, inner = v3["q_lora_rank"], v3["kv_lora_rank"], v3["moe_intermediate_size"]
    nope, value, experts = v3["qk_nope_head_dim"], v3["v_head_dim"], v3["n_routed_experts"]
    attention = query * (hidden + heads * (nope + rope) + 1) + latent * (hidden + heads * (nope + value) + 1)
    attention += hidden * rope + heads * value * hidden + 2 * hidden
    dense = 3 * 3 * hidden * v3["intermediate_size"]
    moe = 58 * (3 * hidden * inner * (experts + 1) + hidden * experts + experts)
    assert (
        elements(deepseek_v3.weight_table(v3)) == 61 * attention + dense + moe + hidden + 2 * hidden * v3["vocab_size"]
    )


def test_exact_mode_in_fp8_costs_what_the_rounded_weights_take(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "moe_intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | wide))
    spec = read_model(tmp_path)
    sections = {
        "run": {"dir": "/tmp/x"},
        "model": {"path": str(tmp_path)},
        "numerics": {"mode": "exact"},
        "rollout": {"prompts": "p", "engines": [{"model": str(tmp_path)}]},
        "reward": {"function": "a.b"},
    }
    plain, blocks = (
        trainer_memory(Config.model_validate(sections | {"publish": {"quantize": rule}}), spec, Sizes(), "cpu")[0]
        for rule in (None, "ieee")
    )
    parts = MegatronLayout(spec.table, Sizes()).parts_of(0)
    parameters = {part.name: torch.zeros(part.shape, dtype=torch.bfloat16) for part in parts}
    served = ServedWeights(parts, parameters, quantization("ieee"), "bfloat16")
    assert blocks.weights - plain.weights == sum(3 * t.numel() for t in served.values.values()) > 0
    assert blocks.peak - plain.peak == blocks.weights - plain.weights


def elements(table: Table) -> int:
    return sum(run.elements * run.count for run in Holdings(table, "bfloat16").runs(Sizes(), 0))


def test_frozen_experts_have_neither_gradients_nor_moments():
    table, sizes = TABLES["qwen"], Sizes(data=2, expert=2)
    frozen = frozenset(
        entry.sources for entry in table.entries() if entry.row.per_expert and entry.expert == 5 and entry.layer == 1
    )
    whole, less = (
        [Buffers(Holdings(table, "float32", f).runs(sizes, rank), Trainer(), sizes).state(rank) for rank in (0, 1)]
        for f in (frozenset(), frozen)
    )
    assert less[0] == whole[0], "expert 5 is on the second rank"
    elements = 3 * 64 * 32
    assert whole[1].gradients - less[1].gradients == 4 * elements
    assert whole[1].optimizer - less[1].optimizer == 8 * elements
    assert whole[1].weights == less[1].weights


# Activations ----------------------------------------------------------------------------------------------------------

DENSE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 16,
    "kv_channels": 64,
    "ffn_hidden_size": 4096,
}


def setting(**fields: Any) -> Setting:
    return Setting(
        **{"tokens": 2048, "length": 2048, "sizes": Sizes(), "itemsize": 2, "kernels": "engine", "materialized": False}
        | fields
    )


def test_a_dense_layer_keeps_what_korthikanti_count():
    """Expects 34 s b h of 2205.05198 (equation 2 without the attention's probabilities) minus 2 for the missing dropout
    masks, plus 4 for rotated queries and keys, 8 for the gate, and flash attention's row sums."""
    layer = layer_bytes(DENSE, setting(), MLP, LayerKind())
    rows = 4 * DENSE["num_attention_heads"] * 2048
    assert layer.total == (34 - 2 + 4 + 8) * 2048 * 1024 + rows


def test_attention_with_sinks_keeps_a_mask_and_keys_but_no_scores():
    """Plans gpt-oss-120b on TP2 with one rollout at its longest: scores of 32 heads would be 12.5 GiB in fp32."""
    model = {"hidden_size": 2880, "num_attention_heads": 64, "num_query_groups": 8, "kv_channels": 64}
    model |= {"ffn_hidden_size": 2880}
    plain, masked = (
        layer_bytes(model, setting(tokens=10240, length=10240, sizes=Sizes(tensor=2), masked=masked), MLP, LayerKind())
        for masked in (False, True)
    )
    assert masked.core - plain.core == 3 * 10240 * 32 * 72 * 2 + 10240**2 * (2 + 1)
    assert masked.core < 2**30 < 10240**2 * 32 * 4


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_and_sequence_parallelism_divide_all_that_a_layer_keeps(tensor: int):
    """Follows section 4.2.2 there: with both, everything is divided by the tensor-parallel size."""
    whole, part = (layer_bytes(DENSE, setting(sizes=Sizes(tensor=t)), MLP, LayerKind()) for t in (1, tensor))
    assert part.total == pytest.approx(whole.total / tensor)


def test_expert_inputs_are_top_k_copies_at_every_parallelism():
    model = qwen3_moe.transformer_config(QWEN3_30B)
    one = layer_bytes(model, setting(), MOE, LayerKind())
    spread = layer_bytes(model, setting(sizes=Sizes(data=8, expert=8)), MOE, LayerKind())
    split = layer_bytes(model, setting(sizes=Sizes(tensor=4, data=2, expert=2, expert_tensor=4)), MOE, LayerKind())
    assert one.dispatched == 2048 * 8 * 2048 * 2 and one.inner == 2048 * 8 * 2 * 768 * 2
    assert spread.total == one.total
    assert (split.dispatched, split.inner) == (one.dispatched, one.inner / 4), "every rank of an expert gets all tokens"


def test_recomputation_keeps_less_from_form_to_form():
    layers = [layer_bytes(deepseek_v3.transformer_config(DEEPSEEK_V3), setting(), MOE, LayerKind())] * 4

    def kept(**fields: Any) -> float:
        return _layers(layers, Trainer(recompute=Recompute(**fields)))[0]

    plain = kept(granularity="none")
    assert plain == 4 * layers[0].total
    assert kept(granularity="full") == 4 * layers[0].input
    assert kept(granularity="full", layers=2) == 2 * layers[0].input
    assert kept(granularity="full", method="block", layers=1) == layers[0].input + 3 * layers[0].total
    assert kept(granularity="selective", modules=("moe",)) < kept(granularity="selective", modules=("moe_act",)) < plain


def test_micro_batches_in_flight_are_those_of_the_schedules():
    four = Sizes(pipeline=4)
    assert [len(in_flight(four, place, 16)) for place in range(4)] == [4, 3, 2, 1]
    assert len(in_flight(four, 0, 2)) == 2, "no more than there are"
    # megatron-core's interleaved schedule: 2 (P - p - 1) + (v - 1) P warm-up units and the one that follows.
    twice = replace(four, virtual=2)
    assert [len(in_flight(twice, place, 16)) for place in range(4)] == [11, 9, 7, 5]
    assert Counter(in_flight(twice, 0, 16)) == {0: 7, 1: 4}
    # Megatron-LM's report: P (1 + (P - 1) / (P v)) micro-batches of a whole stage on the first rank.
    for pipeline, virtual in ((2, 2), (4, 2), (4, 3), (8, 4)):
        units = len(in_flight(Sizes(pipeline=pipeline, virtual=virtual), 0, 64))
        assert units / virtual == pytest.approx(pipeline * (1 + (pipeline - 1) / (pipeline * virtual)))


# Engines --------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_token_in_the_cache():
    qwen, deepseek = qwen3_moe.transformer_config(QWEN3_30B), deepseek_v3.transformer_config(DEEPSEEK_V3)
    assert kv_bytes(qwen, LayerKind(), EngineSizes(), 2, None) == 2 * 48 * 4 * 128 * 2
    assert kv_bytes(qwen, LayerKind(), EngineSizes(tensor=8), 2, None) == 2 * 48 * 1 * 128 * 2, "query groups repeat"
    assert kv_bytes(qwen, LayerKind(), EngineSizes(tensor=8, attention_data=8), 2, "fp8_e4m3") == 2 * 48 * 4 * 128
    # 70 KB per token: 2412.19437's latents of 512 + 64 in 61 layers.
    assert kv_bytes(deepseek, LayerKind(), EngineSizes(tensor=16), 2, "auto") == 61 * 576 * 2


@pytest.mark.parametrize(("nbytes", "taken"), [(1, 1), (4096, 4096), (4097, 8192), (5 * 2**30, 8 * 2**30)])
def test_pinned_memory_that_is_rounded_comes_in_powers_of_two(nbytes: int, taken: int):
    assert pinned(nbytes) == taken


def test_copies_of_parameters_take_what_rounding_makes_of_them():
    run = {"chunk": 0, "dtype": "bfloat16", "expert": False, "tied": False, "trained": True, "parameter": True}
    runs = [
        ParameterRun(name="linear.weight", elements=3 * 2**20, count=5, **run),
        ParameterRun(name="norm.weight", elements=2**12, count=2, **run),
    ]
    state = Buffers(runs, Trainer(), Sizes()).state(0)
    elements = 5 * 3 * 2**20 + 2 * 2**12
    assert state.pinned_share == (5 * 4 * 2**20 + 2 * 2**12) / elements
    assert state.weights <= state.pinned_weights == pinned(state.weights), "one buffer holds them all"
