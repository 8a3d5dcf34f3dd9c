"""A newcomer's session: the commands of README.md, as they stand there, can be executed where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import Block, blocks
from tests.newcomer import execute, make_home

pytestmark = pytest.mark.costly
NO_COMMANDS = {"The quickstart 2": "a picture of a step"}
"""Blocks without a command, each with what it is."""
BLOCKS = blocks("README.md")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("newcomer")
    make_home(directory)
    return directory


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_the_commands_of_the_readme_run(block: Block, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert bool(block.commands()) != (block.name in NO_COMMANDS)
    assert [(words, execute(words)) for words in block.commands()] == [(words, 0) for words in block.commands()]
