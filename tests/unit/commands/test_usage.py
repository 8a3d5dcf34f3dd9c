"""A command line that slimx cannot read is refused by what is wrong in it, in one line and with exit status 2."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from slimx import cli
from slimx.commands import start
from slimx.commands.usage import starts_ray
from slimx.errors import SlimxError
from slimx.extras.doctor import command as doctor
from slimx.extras.evaluation import command as evaluation
from slimx.extras.generation import command as generation
from slimx.extras.planner import command as planner
from tests.refusals import refused


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


def test_the_next_commands_after_a_run_can_be_pasted_into_a_shell(monkeypatch, capsys, tmp_path):
    directory = tmp_path / "op ä"
    (directory / "rollouts").mkdir(parents=True)
    monkeypatch.setattr(cli, "load_config", lambda file, overrides: None)
    monkeypatch.setattr(start, "train", lambda config, console: (directory, None))
    cli.train(Path("run.yaml"))
    following = capsys.readouterr().out.splitlines()[-1].partition(": ")[2]
    assert [shlex.split(command)[2:] for command in following.split(", ")] == [[str(directory)]] * 2


@pytest.mark.parametrize(("typed", "listed"), [([], "rollouts"), (["convert"], "hf-to-megatron")])
def test_a_group_without_a_command_shows_its_help(monkeypatch, capsys, typed, listed):
    monkeypatch.setattr(sys, "argv", ["slimx", *typed])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2 and listed in capsys.readouterr().out


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(None), SystemExit(75), SystemExit("x"), typer.Exit(0)])
@pytest.mark.parametrize(
    ("module", "command"),
    [(cli, "train"), (generation, "generate"), (evaluation, "eval"), (planner, "plan"), (doctor, "doctor")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_the_last_line_of_a_command_is_success(monkeypatch, capsys, module, command, error):
    def leave(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "load_config", leave)
    monkeypatch.setattr(sys, "argv", ["slimx", command, "run.yaml", *(["--hooks"] if command == "doctor" else [])])
    with pytest.raises(SystemExit) as end:
        cli.main()
    refusal = end.value.__context__
    assert end.value.code == 2 and isinstance(refusal, SlimxError) and refusal.code == "cli.exit"
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("slimx: ")]) == 1


@pytest.mark.parametrize(
    ("command", "supervised"),
    [("train", True), ("generate", True), ("eval", True), ("doctor", True), ("plan", False), ("nosuch", False)],
)
def test_commands_that_start_ray_are_known_before_they_run(command, supervised):
    assert starts_ray(cli.app, command) is supervised


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
@pytest.mark.parametrize("prints", [print, lambda text: Console().print(text)])
def test_letters_that_the_output_cannot_show_are_shown_by_their_codes(monkeypatch, encoding, prints):
    written = {name: io.BytesIO() for name in ("stdout", "stderr")}
    for name, bytes_ in written.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(bytes_, encoding=encoding))

    def command(**_: object) -> None:
        prints("\u65e5 \u2192 x")
        raise SlimxError("no \u65e5")

    monkeypatch.setattr(cli, "app", command)
    with pytest.raises(SystemExit):
        cli.main()
    for name in written:
        getattr(sys, name).flush()
    assert written["stdout"].getvalue() == b"\\u65e5 \\u2192 x\n"
    assert written["stderr"].getvalue() == b"slimx: no \\u65e5\n"


@pytest.mark.parametrize(("module", "command"), [(cli, "train"), (generation, "generate"), (evaluation, "eval")])
def test_a_command_says_at_once_which_file_it_checks(monkeypatch, capsys, module, command):
    printed: list[str] = []

    def load(*_: object) -> None:
        printed.extend(capsys.readouterr())
        raise SlimxError("no")

    monkeypatch.setattr(module, "load_config", load)
    monkeypatch.setattr(sys, "argv", ["slimx", command, "a\x1b.yaml"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "".join(printed) == "checking a\\u001b.yaml\n"
    assert printed[command != "eval"] == "", "results of eval alone are on stdout"


@pytest.mark.parametrize("module", ["torch", "torch.missing", "transformers.models.missing"])
def test_a_module_that_setup_installs_is_named_if_it_is_missing(monkeypatch, module):
    """The package, or the part that a broken package lacks."""

    def load(*_: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli, "load_config", load)
    monkeypatch.setattr(sys, "argv", ["slimx", "train", "a.yaml", "--debug"])
    with refused("setup.missing", about=module):
        cli.main()


def test_a_tilde_that_the_shell_leaves_is_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("run: {}")
    monkeypatch.setattr(sys, "argv", ["slimx", "report", "~/run", "--out=~/report.html"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0 and (tmp_path / "report.html").is_file()
