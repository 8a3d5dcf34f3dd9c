"""An engine rank holds what SGLang puts there, under any parallel sizes, against tensors built by plain torch."""

from __future__ import annotations

import re

import pytest

from slimx.config.sections.eval import EvalEngines
from slimx.extras.families import deepseek_v3
from slimx.layout import ranks
from slimx.layout.engine import EngineLayout
from slimx.layout.ranks import EngineSizes
from tests.refusals import refused
from tests.unit.layout.engine_stand import SERVED, engine_rank, engine_sizes
from tests.unit.layout.layout_stand import DEEPSEEK, assert_same, by_rank, checkpoint, fill

CASES = [(name, sizes) for name, served in SERVED.items() for sizes in engine_sizes(served)]


def name_of(sizes: EngineSizes) -> str:
    return f"TP{sizes.tensor}EP{sizes.expert}PP{sizes.pipeline}DP{sizes.attention_data}+{sizes.redundant}"


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda v: v if isinstance(v, str) else name_of(v))
def test_each_rank_holds_what_torch_cuts_out_for_it(name: str, sizes: EngineSizes):
    served = SERVED[name]
    whole = checkpoint(served.model)
    parts = list(EngineLayout(served.table, sizes).parts())
    filled = {id(part): fill(part, whole) for part in parts}
    for rank, by_name in enumerate(by_rank(parts, sizes.world)):
        found = {name: filled[id(part)] for name, part in by_name.items()}
        assert_same(found, engine_rank(served, whole, sizes, rank), f"rank {rank}")


def test_the_cases_cover_the_sizes_that_engines_accept():
    sizes = [sizes for _, sizes in CASES]
    assert any(s.attention_tensor == 8 for s in sizes), "more ranks than key and value heads"
    assert any(s.redundant and s.expert == 4 for s in sizes) and any(s.expert_tensor == 4 for s in sizes)
    assert any(s.attention_data == 4 and s.expert == 2 for s in sizes) and any(s.pipeline == 3 for s in sizes)


def test_a_router_bias_is_fp32_and_what_fp8_checkpoints_quantize_is_marked():
    for part in EngineLayout(SERVED["fused"].table, EngineSizes()).parts():
        assert part.dtype == ("float32" if part.name.endswith("e_score_correction_bias") else None)
        outside = ("norm", "gate.weight", "bias", "lm_head", "embed_tokens")
        assert part.quantized == (not any(word in part.name for word in outside)), part.name


def test_a_model_without_query_compression_has_its_projections_apart():
    """Moonlight: q_lora_rank is null."""
    table = deepseek_v3.engine_table(DEEPSEEK | {"q_lora_rank": None})
    parts = {part.name: part for part in EngineLayout(table, EngineSizes(tensor=2)).parts() if 1 in part.ranks}
    attention = "model.layers.0.self_attn."
    shapes = {name.removeprefix(attention): p.shape for name, p in parts.items() if name.startswith(attention)}
    assert shapes == {
        "q_proj.weight": (32, 28),
        "kv_a_proj_with_mqa.weight": (24, 28),
        "kv_a_layernorm.weight": (18,),
        "kv_b_proj.weight": (48, 18),
        "o_proj.weight": (28, 28),
    }
    assert parts[attention + "q_proj.weight"].rects[0].row == 32


@pytest.mark.parametrize(
    ("layers", "split"), [(61, (15, 15, 15, 16)), (7, (2, 2, 3)), (5, (1, 2, 2)), (3, (1, 2)), (8, (4, 4)), (4, (4,))]
)
def test_the_last_stages_take_the_layers_that_do_not_divide(layers: int, split: tuple[int, ...]):
    """As `sglang.srt.distributed.utils.get_pp_indices`, which cannot be imported without the adapters."""
    table = deepseek_v3.engine_table(DEEPSEEK | {"num_hidden_layers": layers})
    stages = [
        part.ranks[0]
        for part in EngineLayout(table, EngineSizes(pipeline=len(split))).parts()
        if part.name.endswith("input_layernorm.weight")
    ]
    assert stages == [stage for stage, count in enumerate(split) for _ in range(count)]


def test_every_checkpoint_tensor_that_the_engine_serves_is_in_its_table():
    for served in SERVED.values():
        whole = checkpoint(served.model)
        parts = EngineLayout(served.table, EngineSizes()).parts()
        read = {name for part in parts for name in part.sources}
        mtp = {name for name in whole if name.startswith("model.layers.4.")}
        assert read == whole.keys() - mtp, served.name


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        (EngineSizes(tensor=4, expert=4, redundant=2), ["4", "6", "4", "2"]),
        (EngineSizes(tensor=8, expert=8), ["8", "4", "4", "0"]),
    ],
    ids=lambda v: name_of(v) if isinstance(v, EngineSizes) else "",
)
def test_experts_that_cannot_be_shared_are_refused_with_the_numbers(sizes: EngineSizes, numbers: list[str]):
    """The size, the experts that it does not divide, those of the model and the redundant ones."""
    with refused("engine_layout.experts", about="rollout.engines.expert") as caught:
        EngineLayout(SERVED["qwen"].table, sizes)
    assert re.findall(r"\d+", str(caught.value)) == numbers


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"expert": 8, "tensor": 8}, "expert"), ({"pipeline": 99}, "pipeline")],
)
def test_sizes_are_refused_by_the_key_of_their_group(fields: dict[str, int], name: str):
    sizes = ranks.engine_sizes(EvalEngines(frozen="pipeline" in fields, **fields))
    with refused(f"engine_layout.{'layers' if name == 'pipeline' else 'experts'}", about=f"eval.engines.{name}"):
        EngineLayout(SERVED["qwen"].table, sizes)
    assert sizes == EngineSizes(**fields), "plans for groups of equal sizes are the same"


def test_shards_that_cannot_be_shared_are_refused_with_the_number():
    with refused("engine_layout.tensor") as caught:
        list(EngineLayout(SERVED["qwen"].table, EngineSizes(tensor=8)).parts())
    assert caught.value.about.endswith("w13_weight")
