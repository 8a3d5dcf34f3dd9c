"""Shared by the tests of `slimx plan`: the command in a directory with nothing else, and a run that it plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimx import cli
from slimx.config.load import load_config
from slimx.errors import SlimxError
from slimx.extras.planner.plan.report import plan_report
from tests.published import QWEN3_30B

SHALLOW = QWEN3_30B | {"num_hidden_layers": 2}
RUN_30B = (
    "trainer={world_size: 8, tensor: 4, expert: 8, expert_tensor: 1}",
    "rollout.engines=[{tensor: 4, expert: 4, count: 2}]",
    "publish.transport=nixl",  # engines are on another node than trainers where nodes are known
)


class Planning:
    """`slimx plan` in a directory with nothing else."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self.directory, self.capsys, self.monkeypatch = directory, capsys, monkeypatch
        self.refusal: BaseException | None = None
        """Error that ended the last call."""

    def __call__(self, hf: Any, *arguments: str) -> tuple[int, str]:
        """Returns exit status and output for a config.json with `hf`."""
        model, file = self.directory / "model", self.directory / "run.yaml"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(hf))
        values = {
            "run": {"dir": str(self.directory / "run")},
            "model": {"path": str(model)},
            "rollout": {"prompts": "absent.jsonl"},
            "publish": {"encoding": "auto"},
        }
        file.write_text(yaml.safe_dump(values))
        self.monkeypatch.setattr(sys, "argv", ["slimx", "plan", str(file), *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = self.capsys.readouterr()
        self.refusal = end.value.__context__
        return end.value.code or 0, out + err

    def refuses(self, hf: Any, *arguments: str) -> SlimxError:
        """Returns the refusal, after checking that it is one line of output with exit status 2."""
        code, text = self(hf, *arguments)
        if not isinstance(self.refusal, SlimxError):  # the first violation of a plan that could be made
            config = load_config(self.directory / "run.yaml", list(arguments))
            self.refusal = plan_report(config).problems[0]
        assert (code, text) == (2, f"slimx: {self.refusal}\n") and text.count("\n") == 1
        return self.refusal


H100 = "cluster.gpu=h100"


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]
