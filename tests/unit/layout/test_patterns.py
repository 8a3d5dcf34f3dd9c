"""Patterns of parameters: matched against names of both kinds, refused with the nearest name."""

from __future__ import annotations

import json

import pytest

from slimx.config.schema import Config
from slimx.extras.quickstart.make_model import CONFIG
from slimx.layout.patterns import select
from slimx.models.families import ModelSpec, read_model
from slimx.rules.layout import check_layout
from tests.refusals import refused


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return read_model(str(path))


def names(spec: ModelSpec, *patterns: str) -> set[str]:
    return {source for sources in select(spec.table, patterns, "trainer.freeze") for source in sources}


def test_a_pattern_matches_names_of_the_whole_model_in_either_naming(spec):
    assert names(spec, "model.embed_tokens.weight") == names(spec, "embedding.word_embeddings.weight")
    gates = names(spec, "*.mlp.gate.weight")
    assert gates == names(spec, "decoder.layers.*.mlp.router.weight")
    assert len(gates) == spec.table.layers
    assert names(spec, "decoder.layers.1.self_attention.linear_qkv.weight") == {
        f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"
    }


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name(spec):
    with refused("layout.pattern", about="trainer.freeze") as caught:
        names(spec, "*.mlp.gate.weight", "model.layers.0.mlp.gates.weight")
    assert "model.layers.0.mlp.gates.weight" in str(caught.value) and ".mlp.gate.weight?" in str(caught.value)


def test_a_part_of_a_fused_parameter_is_refused_with_its_other_parts(spec):
    with refused("layout.pattern_part"):
        names(spec, "*.q_proj.weight")
    assert len(names(spec, "*.q_proj.weight", "*.[kv]_proj.weight")) == 3 * spec.table.layers


def test_a_run_that_would_train_nothing_is_refused_before_it_starts(spec):
    config = Config.model_validate(
        {
            "run": {"dir": "d"},
            "model": {"path": "m"},
            "rollout": {"prompts": "p", "engines": []},
            "algorithm": {"name": "sft"},
            "trainer": {"freeze": ["*"]},
        }
    )
    with refused("layout.freeze", about="trainer.freeze"):
        check_layout(config.trainer, spec)
