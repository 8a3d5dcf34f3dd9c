"""Routes of trajectories on their way to the trainers: checked, cut by pipeline stage, padded, refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from slimx.config.rule import broken, rules_in
from slimx.config.schema import Config
from slimx.data.batch import make_rows
from slimx.data.packing import pack
from slimx.data.records import Span, Trajectory
from slimx.data.routes import RouteShape, check_routes
from slimx.extras.quickstart.make_model import CONFIG
from slimx.layout.ranks import Sizes, stage_layers
from slimx.models.families import read_model
from slimx.preflight.facts import route_shape
from slimx.rules import trainer as trainer_rules
from slimx.trainer.moe.routes import known_routes
from slimx.trainer.step.metrics import gap_metrics
from tests.refusals import refused

SHAPE = RouteShape(layers=4, moe_layers=(1, 2, 3), experts=8, topk=3)


def trajectory(name: str, length: int, routes: np.ndarray | None) -> Trajectory:
    return Trajectory(
        id=name,
        rollout_id=name,
        group_id="g",
        index=0,
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        logprobs=np.full(length, np.nan, np.float32),
        spans=[Span(start=0, stop=length, source="inserted")],
        routed_experts=routes,
    )


def routed(name: str, length: int, seed: int = 0) -> Trajectory:
    chosen = np.random.default_rng(seed).random((length - 1, 4, 8)).argsort(-1)[..., :3].astype(np.uint8)
    chosen[:, 0] = 255  # whatever engines report for a dense layer
    return trajectory(name, length, chosen)


def test_valid_routes_pass():
    check_routes([routed("a", 9), routed("b", 2)], SHAPE)


@pytest.mark.parametrize(
    ("spoil", "code", "named"),
    [
        (lambda routes: None, "routes.missing", ["routed_experts"]),
        (lambda routes: routes[:, :3], "routes.shape", ["[8, 3, 3]", "[8, 4, 3]", "1 to 3"]),
        (lambda routes: routes[..., :2], "routes.shape", ["[8, 4, 2]", "[8, 4, 3]"]),
        (lambda routes: _with(routes, (5, 2, 1), 8), "routes.experts", ["layer 2", "token 5", "0 to 7"]),
        (lambda routes: _with(routes.astype(np.int32), (5, 2, 1), -1), "routes.experts", ["layer 2", "token 5"]),
        (lambda routes: _with(routes, (7, 3, 2), routes[7, 3, 0]), "routes.twice", ["layer 3", "token 7"]),
    ],
)
def test_an_invalid_route_is_named_by_trajectory_layer_and_token(spoil, code, named):
    bad = routed("b", 9, seed=1)
    bad.routed_experts = spoil(bad.routed_experts)
    with refused(code, about="b") as caught:
        check_routes([routed("a", 9), bad], SHAPE)
    assert all(part in str(caught.value) for part in named)


def _with(routes: np.ndarray, place: tuple[int, int, int], value: int) -> np.ndarray:
    routes = routes.copy()
    routes[place] = value
    return routes


@pytest.mark.parametrize(
    ("sizes", "layers", "expected"),
    [
        (Sizes(), 3, [(0, 1, 2)]),
        (Sizes(pipeline=2), 4, [(0, 1), (2, 3)]),
        (Sizes(pipeline=2, virtual=2), 8, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (Sizes(pipeline=2, virtual=2, split=(1, 3, 0, 2)), 6, [(0,), (1, 2, 3, 4, 5)]),
    ],
)
def test_stages_hold_their_layers_chunk_by_chunk(sizes, layers, expected):
    assert stage_layers(sizes, layers) == expected


def test_a_pipeline_stage_gets_the_routes_of_its_layers():
    rows = make_rows([routed("a", 9), routed("b", 5, 1)], [1.0, 1.0], [np.ones(8) / 12, np.ones(4) / 12])
    batch, cut = (pack(rows, data_size=1, max_tokens=64, multiple_of=16).shards[0][0] for _ in range(2))
    cut.route_layers = (1, 3)
    assert cut.route_layers == (1, 3)
    assert np.array_equal(cut.routed_experts, batch.routed_experts[:, [1, 3]])
    assert np.array_equal(cut.tokens, batch.tokens)


# On a rank ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch():
    return packed()


def packed():
    rows = make_rows([routed("a", 9), routed("b", 5, 1)], [1.0, 1.0], [np.ones(8) / 12, np.ones(4) / 12])
    return pack(rows, data_size=1, max_tokens=64, multiple_of=16).shards[0][0]


def engine_routes(batch, layers):
    from slimx.trainer.moe.routes import engine_routes as function

    return function(batch, layers, experts=8, topk=3)


def test_a_rank_takes_its_layers_routes_and_valid_padding(batch):
    whole = engine_routes(batch, [1, 3])
    cut = packed()
    cut.route_layers = (1, 2, 3)
    assert (engine_routes(cut, [1, 3]) == whole).all()
    real = ~batch.padding
    assert np.array_equal(whole[:, real], batch.routed_experts[real][:, [1, 3]].transpose(1, 0, 2))
    padded = whole[:, batch.padding]
    assert padded.size and all(len(set(token)) == 3 and max(token) < 8 for layer in padded for token in layer)


def test_routes_that_do_not_fit_a_rank_are_refused(batch):
    cut = packed()
    cut.route_layers = (1, 2)
    with refused("routes.layer", about="layer 3"):
        engine_routes(cut, [1, 3])
    with refused("routes.missing"):
        engine_routes(replace(batch, routed_experts=None), [1])
    with refused("routes.shape"):
        engine_routes(replace(batch, routed_experts=batch.routed_experts[..., :2]), [1])


def test_rows_without_routes_are_neither_compared_nor_replayed():
    without = routed("b", 5, 1)
    without.routed_experts = None
    rows = make_rows([routed("a", 9), without], [1.0, 1.0], [np.ones(8) / 12, np.ones(4) / 12])
    (batch,) = pack(rows, data_size=1, max_tokens=64, multiple_of=16).shards[0]
    known = known_routes(batch)
    assert known.sum() == 8 and not known[batch.padding].any()
    assert not known_routes(replace(batch, routed_experts=None, routed=None)).any()
    with refused("routes.missing"):
        engine_routes(batch, [1])
    compared = engine_routes(replace(batch, padding=~known), [1, 3])
    assert np.array_equal(compared[:, known], batch.routed_experts[known][:, [1, 3]].transpose(1, 0, 2))


def test_a_gap_is_unexplained_only_where_the_engines_choice_is_known():
    gap = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    explained = torch.tensor([True, False, False, False, False])
    known = torch.tensor([True, True, False, False, True])
    measured = torch.tensor([True, True, True, True, False])
    found = gap_metrics(gap, torch.zeros(5), measured, explained, explained, known)
    counts = {name.removeprefix("gap/tokens_"): int(value) for name, (_, value) in found.items() if "tokens_" in name}
    assert counts == {"above_1e-5": 3, "other_routes": 1, "unexplained": 1, "without_routes": 1}


def test_a_micro_batch_of_nothing_but_padding_needs_no_routes(batch):
    empty = replace(batch, routed_experts=None, padding=np.ones_like(batch.padding))
    assert engine_routes(empty, [1, 3]).shape == (2, 16, 3)


# Before a run --------------------------------------------------------------------------------------------------------


def test_a_dense_model_is_refused_for_router_features(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = read_model(tmp_path)
    assert route_shape(spec) == RouteShape(layers=2, moe_layers=(0, 1), experts=8, topk=2)

    def config(**moe):
        return Config.model_validate(
            {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "trainer": {"moe": moe}}
        )

    def problems(spec, **moe):
        facts = config(**moe).facts | {"spec": spec}
        return [(problem.code, problem.about) for problem in broken(rules_in(trainer_rules), facts)]

    assert problems(spec, routing_replay="R3", z_loss_coef=0.1) == []
    assert problems(spec, bias_update_rate=0.1) == [("routing.selection_bias", "trainer.moe.bias_update_rate")]
    dense = replace(spec, table=replace(spec.table, experts=0))
    assert problems(dense) == []
    for moe in ({"routing_replay": "R2"}, {"aux_loss_coef": 0.1}, {"z_loss_coef": 0.1}):
        (key,) = moe
        assert problems(dense, **moe) == [("routing.moe_layers", f"trainer.moe.{key}")]
