"""Sections and layouts with which images were never tested are refused before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimx.config.rule import all_rules, broken
from slimx.preflight.facts import model_facts
from tests.extras.vision.vision_stand import run, seeing
from tests.refusals import invalid

LORA = {"rank": 2, "alpha": 4}


@pytest.mark.parametrize(
    ("sections", "code", "about"),
    [
        ({"trainer": {"lora": LORA, "vision": {"train": "tower"}}}, "vision.lora", "trainer.vision.train"),
        ({"trainer": {"fp8": "blockwise"}}, "vision.precision", "trainer.fp8"),
        ({"publish": {"quantize": "int4"}}, "vision.precision", "publish.quantize"),
        (
            {"rollout": {"prompts": "p", "engines": [{"name": "a", "sglang": {"mm_enable_dp_encoder": True}}]}},
            "vision.engines",
            "rollout.engines.sglang.mm_enable_dp_encoder",
        ),
        ({"algorithm": {"name": "ppo"}, "critic": {}}, "vision.algorithm", "critic"),
        ({"algorithm": {"name": "dpo"}}, "vision.algorithm", "algorithm.name"),
    ],
    ids=str,
)
def test_sections_that_were_never_tested_with_images_are_refused(tmp_path: Path, sections, code, about) -> None:
    with invalid(code, about=about):
        run(tmp_path, **sections)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({}, []),
        ({"vision": {"train": "tower"}}, []),
        ({"lora": LORA}, []),
        ({"world_size": 3, "pipeline": 3}, [("layout.deepstack", "trainer.pipeline")]),
        ({"world_size": 3, "pipeline": 3, "vision": None}, []),
    ],
    ids=str,
)
def test_the_first_stage_has_the_layers_with_features(tmp_path: Path, trainer: dict[str, Any], expected) -> None:
    config = run(tmp_path, trainer=trainer)
    found = broken(all_rules(), model_facts(config, seeing(config)))
    codes = ("vision.", "layout.deepstack")
    assert [(problem.code, problem.about) for problem in found if problem.code.startswith(codes)] == expected
