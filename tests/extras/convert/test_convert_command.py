"""`slimx convert` as it is typed: what it says, and one sentence with exit code 2 for whatever it is given."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimx import cli
from slimx.extras.convert import run
from tests.checkpoint_stand import QWEN3_MOE, same, tensors_of
from tests.extras.convert.convert_stand import content, fields, go

LONG = "x" * 300


@pytest.fixture(scope="module")
def megatron(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(run.hf_to_megatron(qwen), tmp_path_factory.mktemp("converted") / "megatron")


def test_the_command_says_what_it_wrote(qwen, tmp_path):
    result = CliRunner().invoke(cli.app, ["convert", "hf-to-megatron", str(qwen), str(tmp_path / "m"), "--verify"])
    assert result.exit_code == 0, result.output
    assert "1 file, " in result.output and "0.00" not in result.output and "verified" in result.output
    arguments = ["convert", "megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), "--original", str(qwen)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert same(tensors_of(tmp_path / "hf"), tensors_of(qwen)) == []


def link(path: Path) -> None:
    path.symlink_to("nowhere")


def written(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(data) and None


def instead(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return change


SHARD = "model-00001.safetensors"
# What is done to a copy of the checkpoint in `source`, and how the command goes on ({}: the directory of the test).
CASES: dict[str, tuple[Callable[[Path], object] | None, str]] = {
    "no source": (None, "hf-to-megatron {}/none {}/out"),
    "a file as source": (None, "hf-to-megatron {}/source/config.json {}/out"),
    "a source with a name that no file can have": (None, f"hf-to-fp8 {{}}/{LONG} {{}}/out"),
    "an output with such a name": (None, f"hf-to-megatron {{}}/source {{}}/{LONG}"),
    "an output that is the source": (None, "hf-to-megatron {}/source {}/source"),
    "an output below a file": (None, "hf-to-megatron {}/source {}/source/config.json/out"),
    "an output that ends above": (None, "hf-to-megatron {}/source {}/none/.."),
    "an output that links to nothing": (lambda source: link(source.parent / "out"), "hf-to-megatron {}/source {}/out"),
    "a list for a layout": (None, "hf-to-megatron {}/source {}/out --layout [2]"),
    "a layout larger than memory": (None, "hf-to-megatron {}/source {}/out --layout pipeline=1000000000"),
    "a layout of more stages than layers": (None, "hf-to-megatron {}/source {}/out --layout pipeline=8,virtual=60000"),
    "a size of 5,000 digits": (None, f"hf-to-megatron {{}}/source {{}}/out --layout tensor={'9' * 5000}"),
    "a family that is none": (None, "hf-to-megatron {}/source {}/out --family os"),
    "another family": (None, "hf-to-megatron {}/source {}/out --family examples.mixtral"),
    "a Hugging Face directory for a Megatron one": (None, "megatron-to-hf {}/source {}/out --original {}/source"),
    "no JSON in config.json": (written("config.json", b"\xff"), "hf-to-megatron {}/source {}/out"),
    "a number in config.json": (written("config.json", b"3"), "hf-to-fp8 {}/source {}/out"),
    "a directory for config.json": (instead("config.json", Path.mkdir), "hf-to-megatron {}/source {}/out"),
    "a text as quantization": (lambda d: fields(d, quantization_config="fp8"), "hf-to-megatron {}/source {}/out"),
    "texts as rotary scaling": (lambda d: fields(d, rope_scaling=["yarn"]), "hf-to-megatron {}/source {}/out"),
    "another activation": (lambda d: fields(d, hidden_act="gelu"), "hf-to-megatron {}/source {}/out"),
    "an empty shard": (written(SHARD, b""), "hf-to-megatron {}/source {}/out"),
    "a header without end": (written(SHARD, b"\xff" * 64), "hf-to-fp8 {}/source {}/out"),
    "a pipe for a shard": (instead(SHARD, os.mkfifo), "hf-to-megatron {}/source {}/out"),
}


def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> tuple[object, str]:
    """Returns the exit code and all output of `slimx convert`."""
    monkeypatch.setattr("sys.argv", ["slimx", "convert", *command])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    return left.value.code, captured.out + captured.err


@pytest.mark.parametrize("what", CASES)
def test_every_invalid_input_is_refused_in_one_sentence(qwen, tmp_path, monkeypatch, capsys, what):
    prepare, line = CASES[what]
    source = shutil.copytree(qwen, tmp_path / "source")
    if prepare is not None:
        prepare(source)
    before = content(tmp_path)
    code, output = typed(monkeypatch, capsys, line.replace("{}", str(tmp_path)).split())
    assert code == 2
    assert output.startswith("slimx: ") and len(output.splitlines()) == 1
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "option", [["--file-size", "inf"], ["--file-size", "1e300"], ["--threads", "0"], ["--threads", "9" * 30]]
)
def test_an_option_out_of_its_range_is_refused_by_name(qwen, tmp_path, monkeypatch, capsys, option):
    code, output = typed(monkeypatch, capsys, ["hf-to-megatron", str(qwen), str(tmp_path / "out"), *option])
    assert (code, option[0] in output, "Traceback" in output) == (2, True, False)
    assert list(tmp_path.iterdir()) == []


VALUES = (None, -1, 0, 3.5, 1e30, 10**12, True, "x", [], {})


@pytest.mark.slow("full grid of fields and values")
@pytest.mark.parametrize("field", QWEN3_MOE)
def test_any_value_of_any_field_is_converted_or_refused_in_one_sentence(qwen, tmp_path, monkeypatch, capsys, field):
    """Fields that no tensor depends on may say anything here: trainers ask for them."""
    source = shutil.copytree(qwen, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for number, value in enumerate(VALUES):
        (source / "config.json").write_text(json.dumps(config | {field: value}))
        out = tmp_path / f"{number}"
        code, output = typed(monkeypatch, capsys, ["hf-to-megatron", str(source), str(out)])
        assert code in (0, 2) and len(output.splitlines()) == 1, (value, output)
        assert out.exists() == (code == 0), value


@pytest.mark.parametrize(
    "name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp", "../latest_checkpointed_iteration.txt"]
)
def test_a_damaged_megatron_directory_is_refused_in_one_sentence(qwen, megatron, tmp_path, monkeypatch, capsys, name):
    for number, damage in enumerate((lambda old: b"", lambda old: b"\xff" * 400 + old[400:], lambda old: old[:-50])):
        source, out = shutil.copytree(megatron, tmp_path / f"m{number}"), tmp_path / f"out{number}"
        file = source / "release" / name
        file.write_bytes(damage(file.read_bytes()))
        code, output = typed(monkeypatch, capsys, ["megatron-to-hf", str(source), str(out), "--original", str(qwen)])
        assert len(output.splitlines()) == 1
        assert code == (0 if name == "common.pt" else 2), output
        assert code == 2 or same(tensors_of(out), tensors_of(qwen)) == []
