"""The snippets of docs/python.md run as they are printed; only the training itself is left out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import slimx
from slimx.commands import start
from slimx.extras.quickstart.make_model import make_model
from tests.documents import blocks
from tests.extras.scripting.run_stand import write_run

RUN = "run: {dir: runs/a}\nmodel: {path: models/tiny}\nrollout: {prompts: prompts.jsonl}\ncheckpoint: {every: 20}\n"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[slimx.Config]:
    """The directory in which the snippets run; returns the configurations of the runs that they start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make_model(tmp_path / "models" / "tiny", seed=1)
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n' * 8)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rewards.py").write_text("def reward(ctx, trajectory):\n    return True\n")
    write_run(tmp_path / "runs" / "quickstart", tmp_path / "models" / "tiny")
    configs: list[slimx.Config] = []

    def train(config: slimx.Config, console: Console) -> tuple[Path, None]:
        configs.append(config)
        directory = Path(config.run.dir)
        write_run(directory, tmp_path / "models" / "tiny")
        return directory, None

    monkeypatch.setattr(start, "train", train)
    return configs


def test_the_snippets_of_the_page_run(desk: list[slimx.Config], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    snippets = [block for block in blocks("docs/python.md") if block.language == "python"]
    for block in snippets:
        module = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(compile(block.text, block.name, "exec"), vars(module))
    assert len(snippets) == 5 and [config.reward.function for config in desk] == ["__main__.reward", "rewards.reward"]
    assert [config.schedule.steps for config in desk] == [20, 200]
    printed = capsys.readouterr().out
    assert "200 runs/a" in printed and "Qwen3MoeForCausalLM" in printed
