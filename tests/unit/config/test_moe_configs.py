"""`slimx plan` accepts every recipe and configuration of a large model, from its config.json alone."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from slimx.config.load import load_config
from slimx.extras.planner.plan.report import plan_report
from slimx.extras.planner.rules.machine import crowded_warnings
from slimx.models.families import read_model
from slimx.models.files.torch_dist import iteration_name
from slimx.preflight.hardware import MARGIN
from tools.docs import make_phases

ROOT = Path(__file__).parents[3]
FILES = sorted(file for file in (ROOT / "configs/moe").glob("*.yaml") if not file.stem.startswith("quickstart"))
FILES += sorted((ROOT / "configs/recipes").glob("*.yaml"))
STAGES = [ROOT / f"configs/recipes/curriculum/{name}.yaml" for name in ("1-format", "2-action", "3-task")]
PARAMETERS = {  # billions, as published, without layers of multi-token prediction
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "Qwen3-Next-80B-A3B-Instruct": 79.7,
    "DeepSeek-V3": 671,
    "DeepSeek-V3.2": 671.9,
    "Kimi-K2-Instruct": 1026,
    "Kimi-K2.5": 1026.9,
    "Kimi-K2.5-bf16": 1026.9,
    "GLM-4.5": 353,
    "GLM-4.5-Air": 106.85,
    "GLM-5": 744,
    "gpt-oss-120b-bf16": 116.8,
    "Ling-flash-2.0": 103,
    "MiMo-7B-Base": 7.62,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen2.5-32B-Instruct": 32.8,
    "Qwen3-VL-8B-Instruct": 8.77,
    "Qwen3-VL-30B-A3B-Instruct": 31.1,
    "Qwen3-VL-235B-A22B-Instruct": 236,
    "Qwen3.5-35B-A3B": 35.1,
    "Qwen3.5-397B-A17B": 397,
}


LARGE = {
    "deepseek-v3",
    "deepseek-v3-gb300",
    "deepseek-v3.2",
    "glm-4.5",
    "glm-5-gb300",
    "kimi-k2",
    "kimi-k2.5-gb300",
    "ling-flash-2.0",
    "qwen3-235b-a22b",
    "qwen3-next-80b-a3b",
    "qwen3-vl-235b-a22b",
    "qwen3-vl-235b-a22b-gb300",
    "qwen3.5-35b-a3b-gb300",
    "qwen3.5-397b-a17b",
    "qwen3.5-397b-a17b-gb300",
}
"""Plans of seconds. Those left have each kind of GPU, schedule, publication, layer and engine, and LoRA."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configurations_model_has_the_published_number_of_parameters(file: Path) -> None:
    path = ROOT / load_config(file, []).model.path
    shapes = read_model(path).table.checkpoint_shapes().values()
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(PARAMETERS[path.name], rel=0.005)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.slow("full grid of shipped configurations") if file.stem in LARGE else ())
        for file in FILES
    ],
    ids=lambda file: file.stem,
)
def test_a_configuration_passes_the_plan(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # model.path names a directory of this repository
    config = load_config(file, [])
    report = plan_report(config).report
    assert not report.violations
    assert report.trainer_memory
    served = bool(config.rollout.engines)
    weighed = {demand.phase for demand in report.phases}
    assert {"load", "restore", "train", "save"} <= weighed and ({"start", "publish", "generate"} <= weighed) == served
    assert ({"sleep", "wake"} <= weighed) == config.schedule.colocate
    for demand in report.phases:
        assert report.gpu_memory - demand.nbytes >= max(MARGIN, config.trainer.memory_margin_mib * 2**20), demand
    assert report.host.nbytes <= report.host.memory, "judged by the kind of GPU"
    assert not [*crowded_warnings(config.served, report.engine_memory, report.batch.requests_in_flight)]
    assert (report.publication is not None) == served and bool(report.engine_memory) == served
    assert report.rank_map.nodes == config.cluster.nodes, "the header names the nodes that the run fills"
    if file in make_phases.FILES:
        table = make_phases.PAGE.read_text()
        assert "\n".join(make_phases.rows(file.stem, report)) + "\n" in table, "run tools.docs.make_phases"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_engines_that_are_published_to_in_fp8_start_from_an_fp8_model(file: Path) -> None:
    config = load_config(file, [])
    for group in config.served.policy if config.publish.quantize else ():
        # A copy that the user converts first is not there.
        described = ROOT / (group.model or config.model.path) / "config.json"
        assert not described.exists() or "quantization_config" in json.loads(described.read_text())


def test_every_kind_of_run_has_a_configuration() -> None:
    configs = [load_config(file, []) for file in FILES]
    assert {Path(config.model.path).name for config in configs} == set(PARAMETERS)
    assert {config.schedule.colocate for config in configs} == {True, False}
    assert {config.publish.quantize is None for config in configs} == {True, False}
    assert any(config.rollout.disaggregated for config in configs)
    assert {config.cluster.gpu for config in configs} == {"h100", "gb300"}


def test_curriculum_stages_fork_from_the_previous_last_checkpoint() -> None:
    stages = [load_config(file, []) for file in STAGES]
    assert stages[0].run.fork is None
    for before, stage in pairwise(stages):
        assert stage.run.fork == f"{before.run.dir}/checkpoints/{iteration_name(before.schedule.steps)}"
        assert stage.run.fork_prompts == "anew"
        assert before.schedule.steps % before.checkpoint.every == 0
        assert stage.schedule.steps > before.schedule.steps, "steps are counted on, so the same number trains nothing"
        sizes = ("world_size", "tensor", "expert", "pipeline")
        assert all(getattr(stage.trainer, size) == getattr(before.trainer, size) for size in sizes)
