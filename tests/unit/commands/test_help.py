"""The help of each command has examples that can be typed, a page that exists, and arguments in capitals."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup

from slimx import cli
from tests.documents import ROOT

PROGRAM = typer.main.get_command(cli.app)


def commands(group: TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the names of every command, those of its groups first."""
    ctx = typer.Context(group)
    for name in group.list_commands(ctx):
        yield (*above, name)
        command = group.get_command(ctx, name)
        if isinstance(command, TyperGroup):
            yield from commands(command, (*above, name))


def find(names: tuple[str, ...]) -> typer.core.TyperCommand | TyperGroup:
    command = PROGRAM
    for name in names:
        command = command.get_command(typer.Context(command), name)
    return command


@pytest.mark.parametrize("names", [*commands(PROGRAM)], ids=" ".join)
def test_the_help_of_a_command_shows_examples_and_a_page(names: tuple[str, ...]) -> None:
    command = find(names)
    text = command.help or ""
    examples = [line.strip() for line in text.splitlines() if line.strip().startswith("slimx ")]
    own = [example for example in examples if example.startswith(" ".join(["slimx", *names]))]
    assert own and own == examples
    for example in own if not isinstance(command, TyperGroup) else []:
        find(names).make_context(names[-1], shlex.split(example)[1 + len(names) :])
    pages = re.findall(r"docs/[\w/-]+\.md", text.partition("Page")[2])
    assert pages and [page for page in pages if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_shown_by_either_option(monkeypatch, capsys, option: str) -> None:
    monkeypatch.setattr(sys, "argv", ["slimx", "convert", "hf-to-fp8", option])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0 and "slimx convert hf-to-fp8 [OPTIONS] SOURCE OUT" in capsys.readouterr().out


def test_arguments_are_in_capitals_without_braces(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["slimx", "train", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "slimx train [OPTIONS] FILE [OVERRIDES]..." in capsys.readouterr().out
