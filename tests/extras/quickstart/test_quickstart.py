"""`slimx quickstart` places its runs where the option says, and ends as the stage that failed."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from slimx.cli import app
from slimx.config.load import load_config
from slimx.data.saved.step_files import DIRECTORY, file_name
from slimx.errors import SlimxError
from slimx.extras.quickstart import command
from slimx.extras.quickstart import run as stages
from slimx.extras.quickstart.run import commands, make, run
from tests.documents import ROOT


def test_stages_are_two_runs_and_a_report(tmp_path: Path) -> None:
    sft, grpo, report = commands(tmp_path, steps=5)
    assert [words[0] for words in (sft, grpo, report)] == ["train", "train", "report"]
    first, second = load_config(sft[1], sft[2:]), load_config(grpo[1], grpo[2:])
    assert (first.schedule.steps, second.schedule.steps) == (20, 5)
    assert second.trainer.load == f"{first.run.dir}/hf"
    assert report[1:3] == [first.run.dir, second.run.dir]
    for config in (first, second):
        paths = [config.run.dir, config.model.path, config.rollout.prompts]
        assert all(Path(path).is_relative_to(tmp_path) for path in paths)
    assert all(Path(path).is_relative_to(tmp_path) for path in second.eval.files.values())


def test_the_default_is_what_the_configurations_say() -> None:
    sft, grpo, _ = commands(Path("runs"), steps=None)
    assert [Path(words[1]).resolve() for words in (sft, grpo)] == [
        ROOT / "configs/moe/quickstart-sft.yaml",
        ROOT / "configs/moe/quickstart.yaml",
    ]
    assert (sft[2:], grpo[2:]) == ([], [])
    written = stages.overrides("quickstart", Path("runs"), None)
    assert load_config(grpo[1], written) == load_config(grpo[1])
    assert load_config(sft[1], stages.overrides("quickstart-sft", Path("runs"), None)) == load_config(sft[1])


@pytest.mark.parametrize("directory", ["a b", "a #b", "a: b", "[x]", "'x", 'q"x', "*x", "1", "a=b, c", "é"])
def test_a_directory_may_have_any_name(directory: str) -> None:
    for name in ("quickstart-sft", "quickstart"):
        config = load_config(stages.CONFIGS / f"{name}.yaml", stages.overrides(name, Path(directory), None))
        assert config.run.dir == f"{directory}/{name}" and config.model.path == f"{directory}/quickstart-data/model"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SlimxError) as refusal:
        make(tmp_path / "file")
    assert (refusal.value.code, refusal.value.about) == ("quickstart.dir", str(tmp_path / "file"))


def test_a_stage_that_fails_ends_the_quickstart_with_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "no-such-file.yaml"]) == 2
    assert "no-such-file.yaml" in capfd.readouterr().err


def test_the_command_adds_nothing_to_a_stage_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "make", lambda directory: None)
    monkeypatch.setattr(command, "run", lambda arguments: 130)
    with pytest.raises(SystemExit) as ended:
        app(["quickstart"], standalone_mode=False)
    assert ended.value.code == 130


def test_the_last_line_names_a_step_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "make", lambda directory: None)
    monkeypatch.setattr(command, "run", lambda arguments: 0)
    directory = tmp_path / "my runs"
    rollouts = directory / "quickstart" / DIRECTORY
    shown = shlex.join(["slimx", "rollouts", str(directory / "quickstart")])
    rollouts.mkdir(parents=True)
    for step in (19, 20):
        (rollouts / file_name(step)).touch()
    app(["quickstart", "--dir", str(directory)], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"{shown} --step 20")
    shutil.rmtree(rollouts)
    app(["quickstart", "--dir", str(directory)], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[-1].endswith(shown)


def test_signals_reach_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    monkeypatch.setattr(stages, "python_argv", lambda *words: [sys.executable, "-c", sleep])
    before = signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    assert run([]) == 128 + signal.SIGTERM
    assert time.monotonic() - start < 30
    assert signal.getsignal(signal.SIGTERM) is before
