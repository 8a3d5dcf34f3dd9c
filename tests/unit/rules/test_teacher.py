"""A teacher of another architecture is refused before the run starts, by the number that differs."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from slimx.config.rule import broken
from slimx.errors import SlimxError
from slimx.models.families import read_model
from slimx.rules.algorithm import same_architecture

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    runpy.run_path(str(ROOT / "slimx/extras/quickstart/make_model.py"))["make_model"](out, seed=1)
    return out


def refusals(other: Path, policy: Path) -> list[SlimxError]:
    """Returns the refusals of the teacher in `other` for the policy."""
    return broken([same_architecture], {"spec": read_model(str(policy)), "teacher_weights": other})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": 1e-3}, "has layernorm_epsilon 0.001, not 1e-06"),
        ({"num_experts_per_tok": 1}, "has moe_router_topk 1, not 2"),
        ({"vocab_size": 130}, "has vocab_size 130, not 128"),
    ],
)
def test_another_number_in_its_configuration_is_named(policy, tmp_path, change, message):
    other = shutil.copytree(policy, tmp_path / "teacher")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | change))
    (problem,) = refusals(other, policy)
    assert (problem.code, problem.about) == ("teacher.architecture", "algorithm.teacher")
    assert message in str(problem) and str(other) in str(problem)


def test_the_same_architecture_is_taken_and_a_lost_file_is_not(policy, tmp_path):
    other = shutil.copytree(policy, tmp_path / "teacher")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    assert refusals(other, policy) == []
    (other / "model.safetensors").unlink()
    (problem,) = refusals(other, policy)
    assert str(other) in str(problem)
