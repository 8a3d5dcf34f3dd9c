"""The command line as a user meets it: `slimx train` up to where the run would start."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from slimx import cli
from slimx.errors import SlimxError

PROMPT = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}


class Started(Exception):
    """The checks passed: the run would start now."""


class Command:
    """`slimx train`, up to the moment when Ray would start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        from slimx.orchestration import session

        def start(config: object, device: str, work: object) -> None:
            raise Started

        monkeypatch.setattr(session, "run_with_ray", start)
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def run(self, file: Path, *overrides: str) -> None:
        self.monkeypatch.setattr(sys, "argv", ["slimx", "train", str(file), *overrides])
        cli.main()

    def refuses(
        self, file: Path, *overrides: str, code: str, about: str | None = None, named: Collection[str] = ()
    ) -> str:
        """Returns the sentence with which the run is refused, which contains what is `named`."""
        refusal, *_ = self.problems(file, *overrides)
        assert refusal.code == code and refusal.about == (about or refusal.about)
        assert all(text in str(refusal) for text in named), refusal
        return str(refusal)

    def problems(self, file: Path, *overrides: str) -> tuple[SlimxError, ...]:
        """Returns the refusal, and those that it joins."""
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            self.run(file, *overrides)
        printed = self.capsys.readouterr()
        assert exit.value.code == 2
        assert printed.out.split() == ["checking", str(file)]
        first, *others = printed.err.splitlines()
        assert first.startswith("slimx: ") and all(line.startswith("  ") for line in others), printed.err
        assert not file.with_name("run").exists(), "a refused run left its directory"
        error = exit.value.__context__
        assert isinstance(error, SlimxError) and printed.err == f"slimx: {error}\n"
        return error, *getattr(error, "problems", ())

    def codes(self, file: Path, *overrides: str) -> list[tuple[str, str]]:
        """Returns the code of each problem, and what it is about."""
        return [(problem.code, problem.about) for problem in self.problems(file, *overrides)]
