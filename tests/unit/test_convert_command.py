"""`slimx convert` as it is typed: what it says, and one sentence with exit code 2 for whatever it is given."""

from __future__ import annotations

from typer.testing import CliRunner

from slimx.cli import app
from tests.checkpoint_stand import same, tensors_of


def test_the_command_says_what_it_wrote(qwen, tmp_path):
    result = CliRunner().invoke(app, ["convert", "hf-to-megatron", str(qwen), str(tmp_path / "m"), "--verify"])
    assert result.exit_code == 0, result.output
    assert "1 files" in result.output and "verified" in result.output
    arguments = ["convert", "megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), "--original", str(qwen)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert same(tensors_of(tmp_path / "hf"), tensors_of(qwen)) == []
