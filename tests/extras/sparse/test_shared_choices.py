"""Layers that share an indexer's choice of tokens (GLM-5.2): which they are, where stages begin, what they cost.
Against transformers: tests/integration/test_families.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer
from transformers import GlmMoeDsaConfig

from slimx.config.rule import broken
from slimx.config.sections.general import Cluster
from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.activations import Setting
from slimx.extras.planner.memory.pipeline import activation_bytes
from slimx.extras.planner.plan.splits import splits
from slimx.extras.sparse.layers import SparseAttention, period
from slimx.layout.ranks import Sizes
from slimx.preflight.hardware import machine_of
from tests.extras.sparse.sparse_stand import GLM_5, INDEXER, read, run, small
from tests.refusals import refused

FULL = {"granularity": "full", "method": "uniform", "layers": 1}
SHARED = small(GLM_5, num_hidden_layers=11, index_topk_freq=4, index_skip_topk_offset=3)
"""Indexers in the layers 0, 1, 2, 6 and 10."""


@pytest.mark.parametrize("types", [["full", "sparse"] * 39, "F" * 77 + "X", "FS"], ids=str)
def test_types_of_indexers_that_no_model_has_are_refused(tmp_path: Path, types: list[str] | str):
    key = "indexer_types" if isinstance(types, list) else "index_topk_pattern"
    with refused("model.field"):
        read(tmp_path, GLM_5 | {key: types})


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"indexer_types": [{"F": "full", "S": "shared"}[kind] for kind in "FFFSSSFSSSF"], "index_topk_freq": 7},
        {"index_topk_pattern": "FFFSSSFSSSF"},
        {
            "indexer_types": [{"F": "full", "S": "shared"}[kind] for kind in "FFFSSSFSSSF"],
            "index_topk_pattern": "FFFSSSFSSSF",  # as transformers saves a model that was made of a pattern
        },
    ],
    ids=lambda fields: " ".join(fields),
)
def test_layers_that_share_a_choice_are_those_of_transformers(tmp_path: Path, fields: dict[str, Any]):
    hf = small(GLM_5, num_hidden_layers=11, num_nextn_predict_layers=1, **fields)
    spec = read(tmp_path, hf, mtp_layers=1)
    theirs = GlmMoeDsaConfig(**{key: value for key, value in hf.items() if key != "architectures"}).indexer_types
    assert spec.layer_kind.indexers == tuple(kind == "full" for kind in theirs)
    offset, every = (spec.transformer[f"dsa_indexer_{name}"] for name in ("skip_topk_offset", "topk_freq"))
    skips = [is_dsa_skip_topk_layer(layer, offset, every) for layer in range(1, 12)]
    assert skips == [kind == "shared" for kind in theirs]
    holders = {int(name.split(".")[2]) for name in spec.table.checkpoint_shapes() if INDEXER in name}
    assert holders == {0, 1, 2, 6, 10, 11}, "the layer of multi-token prediction has an indexer"


def test_a_period_is_found_for_any_that_megatron_core_knows():
    for offset, every, layers in product((1, 2, 3, 5), (1, 2, 4), (4, 9, 13)):
        has = tuple(not is_dsa_skip_topk_layer(layer, offset, every) for layer in range(1, layers + 1))
        found = period(has)
        assert has == tuple(not is_dsa_skip_topk_layer(layer, found[1], found[0]) for layer in range(1, layers + 1))
    assert period((True, False, True, True, False)) is None


@pytest.mark.parametrize(
    ("split", "fits"),
    [
        ((3, 8), False),
        ((6, 5), True),
        ((2, 4, 4, 1), True),
        ((2, 3, 5, 1), False),
        ((6, 5, 0), True),
        ((12, 3), True),  # no layers so many: another rule's
    ],
    ids=str,
)
def test_a_stage_that_begins_with_anothers_choice_is_refused(tmp_path: Path, split: tuple[int, ...], fits: bool):
    spec = read(tmp_path, SHARED)
    facts = {"sizes": Sizes(pipeline=len(split), split=split), "spec": spec}
    found = broken(spec.layer_kind.split_rules(), facts)
    assert {(problem.code, problem.about) for problem in found} == (
        set() if fits else {("sparse.shared_stage", "trainer.layers_per_stage")}
    )


def test_layers_of_multi_token_prediction_that_would_share_are_refused(tmp_path: Path):
    with refused("model.unsupported", about="num_nextn_predict_layers"):
        read(tmp_path, {**SHARED, "num_nextn_predict_layers": 2})


def test_a_shared_choice_stays_until_the_backward_pass_of_its_micro_batch(tmp_path: Path):
    """Counts eight bytes for each token that a query reads, with and without recomputation."""
    spec = read(tmp_path, SHARED)
    setting = Setting(tokens=100, length=100, sizes=Sizes(), itemsize=2, kernels="torch", materialized=True)
    every = SparseAttention((True,) * 11)
    kept = [
        activation_bytes(
            replace(spec, layer_kind=kind), trainer, Sizes(), setting, pipeline_rank=0, microbatches=1
        ).kept
        for kind in (spec.layer_kind, every)
        for trainer in (Trainer(), Trainer.model_validate({"recompute": FULL}))
    ]
    assert kept[0] - kept[2] == kept[1] - kept[3] == 5 * 100 * 100 * 8


def test_suggested_stages_begin_with_an_indexer(tmp_path: Path):
    spec = read(tmp_path, SHARED)
    machine = machine_of(Cluster.model_validate({"gpu": "h100"}))
    found = [fields["layers_per_stage"] for fields in splits(run(tmp_path), spec, machine, 4) if fields["pipeline"] > 1]
    assert found
    for counts in found:
        assert {*accumulate(counts[:-1])} <= {0, 1, 2, 6, 10}


def test_shared_choices_cost_less_to_make_and_to_keep(tmp_path: Path):
    shared, full = (SparseAttention(has) for has in ((True, False) * 4, (True,) * 8))
    model = read(tmp_path, small(GLM_5, num_hidden_layers=8)).transformer
    parts = [kind.attention_flops(model, 8, 0) for kind in (shared, full, SparseAttention((False,) * 8))]
    assert parts[0].quadratic * 2 == parts[1].quadratic
    assert parts[1].linear - parts[0].linear == parts[0].linear - parts[2].linear > 0
    assert [kind.replay_bytes(model, 10, 20, (0, 1, 2, 3)) for kind in (shared, full)] == [2 * 800, 4 * 800]
