"""Refusals that come before torch is imported, and change nothing of the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.extras.evaluation.checks import evaluation_config
from slimx.extras.generation.checks import generation_config
from slimx.extras.quickstart.make_model import make_model
from slimx.layout.ranks import sizes_of
from slimx.observability.live.run_lock import locked
from slimx.orchestration.start import checks
from slimx.orchestration.start.prompts import make_source, source_prompts
from slimx.orchestration.state.resume import trainer_state
from slimx.orchestration.state.saves import RunState, Saves
from tests.refusals import refused

ROOT = Path(__file__).parents[3]
STARTS = {
    "train": "start.train(config, console)",
    "generate": "generation_config(config, None)",
    "eval": "evaluation_config(config, None)",
    "gap": "doctor._show_gap(config, False)",
    "script.train": "slimx.train(config, console=console)",
    "script.evaluate": "slimx.evaluate(config)",
}
PROGRAM = """
import sys
from rich.console import Console
import slimx
from slimx.commands import start
from slimx.extras.doctor import command as doctor
from slimx.extras.evaluation.checks import evaluation_config
from slimx.extras.generation.checks import generation_config
from slimx.config.load import load_config
from slimx.errors import SlimxError
console = Console()
for override in sys.argv[2:]:
    config = load_config(sys.argv[1], [override])
    for call in {calls}:
        try:
            eval(call)
        except SlimxError as error:
            print(error.code, "torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    make_model(out, seed=1)
    return out


@pytest.fixture
def file(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}], "answer": "1"}\n')
    prompts = str(tmp_path / "prompts.jsonl")
    run = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "rollout": {"prompts": prompts},
        "eval": {"prompts": prompts},
        "reward": {"function": "exact"},
        "cluster": {"device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path / "run.yaml"


OVERRIDES = {
    "model.path=/nosuch": "model.directory",
    "rollout.prompts=/nosuch.jsonl": "prompts.unreadable",
    "reward.function=nosuch.reward": "dotted.import",
    "algorithm.credit=nosuch.credit": "dotted.import",
    "cluster.ray_address=127.0.0.1:1": "cluster.unreachable",
    "cluster.device=cuda": "cluster.no_gpu",
    "track.mlflow=http://localhost:1": "track.package",
}


def test_every_start_refuses_before_torch_what_needs_no_model(file: Path, tmp_path: Path) -> None:
    program = PROGRAM.format(calls=list(STARTS.values()))
    command = [sys.executable, "-c", program, str(file), *OVERRIDES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    expected = [f"{code} False" for code in OVERRIDES.values() for _ in STARTS]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_a_file_in_a_packages_place_is_refused_by_name(file: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "nosuchpackage.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "shadow"))
    monkeypatch.setattr(checks, "PACKAGES", ("nosuchpackage",))
    with refused("environment.shadowed", about="nosuchpackage"):
        checks.check_parts(load_config(file))


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("trainer.load", []),
        ("trainer.lora.load", ["trainer.lora.rank=4", "trainer.lora.alpha=8"]),
        ("critic.load", ["algorithm.name=ppo", "critic={}"]),
        ("algorithm.teacher", []),
    ],
)
def test_a_directory_of_weights_that_is_not_there_is_refused_by_its_key(file: Path, key: str, more: list[str]) -> None:
    with refused("weights.directory", about=key):
        checks.check_parts(load_config(file, [*more, f"{key}=/nosuch/weights"]))


# A run that goes on ---------------------------------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


def saved(config: Config, directory: Path) -> Path:
    prompts = source_prompts(config.rollout)
    policies = {"actor": trainer_state(config, sizes_of(config.trainer))}
    state = RunState(1, 1, policies, rollouts={"source": make_source(config, prompts).state(), "tickets": []})
    saves = Saves(directory, keep=1)
    return saves.commit(saves.begin(1), state.files(), {})


def changed(file: Path, checkpoints: str) -> Iterator[tuple[list[str], str]]:
    """Yields overrides with which a run is not the one of its checkpoint, and the code of the refusal."""
    other = file.with_name("other.jsonl")
    other.write_text(file.with_name("prompts.jsonl").read_text().replace('"1"', '"2"'))
    yield ["run.seed=2"], "prompts.changed"
    yield [f"rollout.prompts={other}"], "prompts.changed"
    if checkpoints == "checkpoints":
        yield ["trainer.lora={rank: 4, alpha: 8}"], "resume.lora"
        yield ["algorithm.name=ppo", "critic={}"], "resume.no_critic"


@pytest.mark.parametrize(
    ("folder", "check"),
    [("checkpoints", checks.check_training), ("cursor", lambda config: generation_config(config, None))],
)
def test_a_checkpoint_mismatch_is_refused_without_changes(file: Path, tmp_path: Path, folder: str, check: Any) -> None:
    config, run = load_config(file), tmp_path / "run"
    saved(config, run / folder)
    (run / "metrics.jsonl").write_text('{"step": 2}\n')
    before = contents(run)
    check(config)
    for overrides, code in changed(file, folder):
        with refused(code):
            check(load_config(file, overrides))
        check(load_config(file, [*overrides, "schedule.steps=1"]))  # finished: nothing would be trained
    assert contents(run) == before


def test_a_damaged_checkpoint_is_left_to_the_start_which_passes_over_it(file: Path, tmp_path: Path) -> None:
    point = saved(load_config(file), tmp_path / "run" / "checkpoints")
    (point / "slimx" / "run.json").write_text("{")
    checks.check_training(load_config(file, ["run.seed=2"]))


def test_a_locked_or_unwritable_directory_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    commands = (checks.check_training, lambda config: generation_config(config, None))
    for place in (tmp_path / "afile", tmp_path / "afile" / "run", Path("/proc/nosuch/run")):
        for check in (*commands, lambda config: evaluation_config(config, None)):
            with refused("run.unwritable", about=None):
                check(load_config(file, [f"run.dir={place}"]))
    with locked(tmp_path / "run"):
        before = contents(tmp_path / "run")
        for check in commands:
            with refused("run.locked", about=str(tmp_path / "run")):
                check(load_config(file))
        assert contents(tmp_path / "run") == before
