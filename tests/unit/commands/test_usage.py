"""A command line that slimx cannot read is refused by what is wrong in it, in one line and with exit status 2."""

from __future__ import annotations

import sys

import pytest

from slimx import cli
from slimx.errors import SlimxError


@pytest.mark.parametrize(
    ("typed", "code", "about", "named"),
    [
        (["trian"], "cli.command", "trian", "train"),
        (["convert", "hf-to-megatorn"], "cli.command", "hf-to-megatorn", "hf-to-megatron"),
        (["plan", "f.yaml", "--sugest"], "cli.option", "--sugest", "--suggest"),
        (["report", "runs/a", "--json"], "cli.option", "--json", "slimx status"),
        (["eval"], "cli.missing", "FILE", "slimx eval"),
        (["health", "--disk", "much"], "cli.arguments", "slimx health", "--disk"),
    ],
)
def test_a_command_line_is_refused_by_the_name_that_is_wrong(monkeypatch, capsys, typed, code, about, named):
    monkeypatch.setattr(sys, "argv", ["slimx", *typed])
    with pytest.raises(SystemExit) as end:
        cli.main()
    refusal = end.value.__context__
    assert isinstance(refusal, SlimxError) and (refusal.code, refusal.about) == (code, about)
    assert end.value.code == 2 and named in str(refusal)
    assert capsys.readouterr().err == f"slimx: {refusal}\n"


@pytest.mark.parametrize(("typed", "listed"), [([], "rollouts"), (["convert"], "hf-to-megatron")])
def test_a_group_without_a_command_shows_its_help(monkeypatch, capsys, typed, listed):
    monkeypatch.setattr(sys, "argv", ["slimx", *typed])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and listed in capsys.readouterr().out


def test_a_tilde_that_the_shell_leaves_is_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("run: {}")
    monkeypatch.setattr(sys, "argv", ["slimx", "report", "~/run", "--out=~/report.html"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0 and (tmp_path / "report.html").is_file()
