"""A plan counts the memory in which trainer ranks merge weights with adapters, for publications and for exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimx.config.schema import Config
from slimx.extras.lora.merging_buffer import merging_buffer_bytes
from slimx.extras.lora.targets import adapts
from slimx.extras.planner.memory.publication import merging_memory, packed_on_gpu
from slimx.extras.planner.plan.publication import _dealt
from slimx.extras.planner.plan.report import Planned, plan_report
from slimx.extras.planner.plan.suggest import Search
from slimx.layout.ranks import Sizes
from slimx.models.families import read_model
from slimx.reshard.plan.publication import export_plan
from tests.checkpoint_stand import QWEN3_MOE

TRAINER = {"world_size": 4, "lora": {"rank": 4, "alpha": 8}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | {"max_position_embeddings": 2**15}))
    return tmp_path


def planned(model: Path, device: str = "cpu", **sections: Any) -> tuple[Config, Planned]:
    values = {
        "run": {"dir": "r"},
        "model": {"path": str(model)},
        "cluster": {"device": device},
        "rollout": {"prompts": "p", "engines": [{"name": "a", "count": 4}]},
        "publish": {"bucket_mib": 0.02, "transport": "nixl"},
        "trainer": TRAINER,
    }
    config = Config.model_validate(values | sections)
    return config, plan_report(config)


def test_ranks_that_share_a_publication_merge_what_they_send(model):
    config, found = planned(model)
    report = found.report
    dealt = _dealt(found.published.plan, report.engines, on_gpus=False, staggered=False).plan

    def most(plan: Any) -> int:
        return max(merging_buffer_bytes(plan, lambda name: adapts(None, name)).values())

    assert report.publication.merging_bytes == most(dealt) != most(found.published.plan)
    alone, _ = planned(model, trainer=TRAINER | {"lora": None})
    added = [with_.weights - without.weights for with_, without in paired(report, plan_report(alone).report)]
    assert min(added) >= most(dealt)


def paired(one: Any, other: Any) -> Any:
    return zip(one.trainer_memory, other.trainer_memory, strict=True)


def test_an_export_needs_additional_memory(model):
    spec = read_model(model)
    config, plain = planned(model)
    exporting, found = planned(model, checkpoint={"export_hf": True})
    sizes = plain.report.trainer
    room = max(merging_buffer_bytes(export_plan(exporting, spec, sizes), lambda name: adapts(None, name)).values())
    assert merging_memory(config, spec, sizes, None).exported == 0
    assert merging_memory(exporting, spec, sizes, None).exported == room > 0
    assert {a.weights - b.weights for a, b in paired(found.report, plain.report)} == {room}


def test_merging_counts_the_largest_product_and_a_part_of_a_bucket(model):
    _, found = planned(model, "cuda", numerics={"dtype": "bfloat16"})
    _, without = planned(model, "cuda", numerics={"dtype": "bfloat16"}, trainer=TRAINER | {"lora": None})
    packed = packed_on_gpu(found.compiled.packed, ranks=4)
    assert packed > 0 < without.report.trainer_memory[0].publication
    shapes = [p.shape for p in found.published.plan.parameters if adapts(None, p.name)]
    largest = max(rows * cols for rows, cols in shapes)
    assert {record.publication for record in found.report.trainer_memory} == {packed + 6 * largest}


def test_a_search_for_layouts_counts_merging_too(model):
    gpus = {"device": "cuda", "gpu": "h100"}
    config, found = planned(model, numerics={"dtype": "bfloat16"}, cluster=gpus)
    search = Search(config, found.spec, found.machine, "cuda")
    split, states = next((s, found) for s in search._possible(4) if (found := search._states(s)) is not None)
    weights = [state.state.weights for state in states[0]]
    records = search._weigh(split, config, states).records
    assert all(record.weights > config_weights for record, config_weights in zip(records, weights, strict=True))


def test_adapters_that_are_published_alone_are_few_bytes_and_merge_nothing(model):
    """Sends all weights and adapters once to each engine, which has a slot for them and an empty one."""
    trainer = {"world_size": 4, "lora": {"rank": 4, "alpha": 8, "targets": ["attention"]}}
    sections = {"trainer": trainer, "checkpoint": {"export_hf": True}}
    _, merged = planned(model, publish={"transport": "memory"}, **sections)
    config, alone = planned(model, publish={"transport": "memory", "adapters": "alone"}, **sections)
    hf = QWEN3_MOE
    hidden, queries = hf["hidden_size"], hf["num_attention_heads"] * hf["head_dim"]
    keys = hf["num_key_value_heads"] * hf["head_dim"]
    per_layer = sum(
        4 * (rows + cols) for rows, cols in ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
    )
    adapters = 2 * hf["num_hidden_layers"] * per_layer  # in bfloat16
    before, figures = merged.report.publication, alone.report.publication
    assert (before.adapter_bytes, figures.adapter_bytes) == (0, 4 * adapters)
    assert before.merging_bytes > 0 == figures.merging_bytes
    assert figures.nbytes == figures.received * 4 and figures.tensors == len(alone.spec.table.checkpoint_shapes()) + (
        8 * hf["num_hidden_layers"]
    )
    for one, other in zip(merged.report.engine_memory, alone.report.engine_memory, strict=True):
        assert other.weights - one.weights == 2 * adapters
    assert merging_memory(config, alone.spec, Sizes(data=4), figures and alone.published.plan).published == 0
