"""A real shell completes commands, options and configuration keys with the script that slimx prints for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.rich_utils import rich_render_text

from slimx import cli
from slimx.extras.keys.catalog import all_keys
from slimx.extras.keys.completion import complete
from slimx.extras.keys.pages import SECTIONS

SCRIPTS = {
    "bash": """
eval "$(slimx --show-completion)"
COMP_WORDS=({words} ''); [ -n '{last}' ] && COMP_WORDS[-1]={last}
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_slimx_completion slimx
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "zsh": """
autoload -Uz compinit; compinit -u -D
_arguments() {{ print -r -- "$@" }}
eval "$(slimx --show-completion)"
words=({words} '{last}'); CURRENT=${{#words}}
_slimx_completion
""",
    "fish": """
slimx --show-completion | source
complete --do-complete '{words} {last}'
""",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Directory with the program `slimx` of this interpreter."""
    program = tmp_path / "slimx"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m slimx "$@"\n')
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("shell", "words", "last", "completions"),
    [
        ("bash", "slimx", "ke", {"keys"}),
        ("bash", "slimx train run.yaml", "rollout.sampling.to", {"rollout.sampling.top_p=", "rollout.sampling.top_k="}),
        ("bash", "slimx train run.yaml trainer.moe.dispatcher =", "f", {"flex"}),
        ("zsh", "slimx plan run.yaml", "rollout.sampling.to", {"rollout.sampling.top_p=", "rollout.sampling.top_k="}),
        ("fish", "slimx plan run.yaml", "rollout.sampling.to", {"rollout.sampling.top_p=", "rollout.sampling.top_k="}),
    ],
)
def test_a_shell_completes_commands_and_keys(
    directory: Path, shell: str, words: str, last: str, completions: set[str]
) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed (make ci-deps)")
    script = directory / "script"  # of a file, so that the shell is the parent of slimx
    script.write_text(SCRIPTS[shell].format(words=words, last=last))
    variables = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "HOME": str(directory)}
    ended = subprocess.run([found, str(script)], env=variables, capture_output=True, text=True, timeout=300)
    if shell == "bash":
        assert {*ended.stdout.split()} == completions
    for completion in completions:
        assert completion in ended.stdout, ended.stderr
    assert "rollout.sampling.max" not in ended.stdout


def completed(incomplete: str, *overrides: str) -> list[str]:
    ctx: Any = typer.Context(typer.main.get_command(cli.app))
    ctx.params["overrides"] = overrides
    return [value for value, _ in complete(ctx, incomplete)]


@pytest.mark.parametrize(
    ("incomplete", "values"),
    [
        ("rollout.sampling.temperature", ["rollout.sampling.temperature=", "rollout.sampling.temperature=1.0"]),
        ("cluster.device=", ["cluster.device=auto", "cluster.device=cpu", "cluster.device=cuda"]),
        ("trainer.distributed", ["trainer.distributed_optimizer=true", "trainer.distributed_optimizer=false"]),
        ("run.dir", ["run.dir=", "run.dir=TEXT"]),
        ("nothing", []),
        ("nothing=", []),
    ],
)
def test_a_single_key_is_completed_with_its_values(incomplete: str, values: list[str]) -> None:
    assert completed(incomplete) == values


def test_a_description_is_one_line_which_fish_needs() -> None:
    ctx: Any = typer.Context(typer.main.get_command(cli.app))
    shown = {value: rich_render_text(text) for value, text in complete(ctx, "")}
    assert len(shown) > 300 and [value for value, text in shown.items() if "\n" in text or not text] == []
    assert "ctx.engines[name]" in shown["rollout.engines.0.name="]


def options(command: Any) -> Iterator[tuple[str, str]]:
    """Yields the name and the description of each option of slimx's commands."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield f"{command.name} {parameter.name}", parameter.help or ""
    ctx = typer.Context(command)
    for name in command.list_commands(ctx) if hasattr(command, "list_commands") else ():
        yield from options(command.get_command(ctx, name))


def test_the_description_of_an_option_is_one_line() -> None:
    found = dict(options(typer.main.get_command(cli.app)))
    assert len(found) > 80 and [name for name, text in found.items() if "\n" in rich_render_text(text).strip()] == []


def test_names_of_rewards_are_completed() -> None:
    assert {"math", "exact"} <= {value.partition("=")[2] for value in completed("reward.function")}


def test_all_sections_are_completed_from_nothing() -> None:
    found = {value.partition(".")[0] for value in completed("")}
    assert found == {*SECTIONS} and len(completed("")) == len(all_keys())


@pytest.mark.parametrize(("words", "values"), [(("cluster.device",), 3), (("cluster.device", "="), 3), (("a", "="), 0)])
def test_values_are_completed_after_an_equals_sign_that_bash_splits(words: tuple[str, ...], values: int) -> None:
    assert len(completed("", *words)) == values


@pytest.mark.parametrize("words", ["slimx trian ''", "slimx train run.yaml --lr ''", "slimx ''"])
def test_a_completion_prints_no_error_onto_the_terminal(directory: Path, words: str) -> None:
    variables = {**os.environ, "_SLIMX_COMPLETE": "complete_bash", "COMP_WORDS": words.replace(" ", "\n")}
    variables["COMP_CWORD"] = str(len(words.split()) - 1)
    ended = subprocess.run([directory / "slimx"], env=variables, capture_output=True, text=True, timeout=300)
    assert ended.stderr == ""
