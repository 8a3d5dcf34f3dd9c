"""Conversions on small checkpoints: bit for bit there and back, oracles in plain torch, and what can go wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

from slimx.cli import app
from slimx.convert import run, sources, work
from slimx.convert.target import Target, parse_layout
from slimx.convert.torch_dist import clip
from slimx.convert.work import convert
from slimx.errors import SlimxError
from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table
from slimx.models.families import read_model
from slimx.reshard import reference
from slimx.reshard.kernel import RULE
from tests.checkpoint_stand import DEEPSEEK_V3, QWEN3_MOE, same, tensors_of, write_checkpoint
from tests.integration.megatron_stand import megatron_tensors, write_megatron

LAYOUT = "tensor=2,pipeline=2,expert=4,expert_tensor=1"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "qwen", QWEN3_MOE, file_bytes=100_000)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "deepseek", DEEPSEEK_V3, file_bytes=100_000)


def go(conversion: work.Conversion, out: Path) -> Path:
    convert(conversion, out, threads=2, verify=True)
    return out


def stand_in(qwen: Path, *, per_layer: bool) -> dict[str, torch.Tensor]:
    """What plain torch makes of the tensors, with a vocabulary padded to 192 rows."""
    made = megatron_tensors(tensors_of(qwen), QWEN3_MOE, per_layer=per_layer)
    return {key: value.to(torch.bfloat16) for key, value in made.items()}


# There and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["", LAYOUT, "expert_tensor=2,expert=2"])
@pytest.mark.parametrize("model", ["qwen", "deepseek"])
def test_hugging_face_to_megatron_and_back_gives_every_bit(request, tmp_path, model, layout):
    source = request.getfixturevalue(model)
    megatron = go(run.hf_to_megatron(source, layout=layout, file_bytes=50_000), tmp_path / "megatron")
    back = go(run.megatron_to_hf(megatron, source, file_bytes=70_000), tmp_path / "hf")
    assert same(tensors_of(back), tensors_of(source)) == []
    assert len(list((megatron / "release").glob("*.distcp"))) > 3
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(source).keys()
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_the_megatron_directory_is_what_plain_torch_makes_of_the_tensors(qwen, tmp_path):
    megatron = go(run.hf_to_megatron(qwen, layout=LAYOUT, file_bytes=50_000), tmp_path / "megatron")
    wanted = {
        key: value[:120] if value.shape[0] == 192 else value for key, value in stand_in(qwen, per_layer=False).items()
    }
    found = {key: torch.zeros_like(value) for key, value in wanted.items()}
    dcp.load(found, storage_reader=FileSystemReader(megatron / "release"), no_dist=True)
    assert same(found, wanted) == []
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    common = torch.load(megatron / "release/common.pt", weights_only=False)
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    assert (common["args"].num_layers, common["args"].num_moe_experts, common["args"].padded_vocab_size) == (4, 8, 120)


@pytest.mark.parametrize("per_layer", [False, True])
def test_whole_stacks_and_a_padded_vocabulary_that_another_system_wrote_are_read(qwen, tmp_path, per_layer):
    tensors = stand_in(qwen, per_layer=per_layer)
    # A tensor whose elements are stored in another order than its shape says.
    key = next(key for key in tensors if key.endswith("linear_proj.weight"))
    tensors[key] = tensors[key].transpose(-1, -2).contiguous().transpose(-1, -2)
    megatron = write_megatron(tmp_path / "megatron", tensors, tmp_path / "witness")
    back = go(run.megatron_to_hf(megatron, qwen), tmp_path / "hf")
    assert same(tensors_of(back), tensors_of(qwen)) == []
    assert not (tmp_path / "witness").exists()


def test_dtypes_are_chosen_for_the_model_and_not_for_what_has_its_own(deepseek, tmp_path):
    megatron = go(run.hf_to_megatron(deepseek, dtype=torch.float32), tmp_path / "megatron")
    described = FileSystemReader(megatron / "release").read_metadata().state_dict_metadata
    assert {value.properties.dtype for value in described.values()} == {torch.float32}
    back = go(run.megatron_to_hf(megatron, deepseek, dtype=torch.bfloat16), tmp_path / "hf")
    assert same(tensors_of(back), tensors_of(deepseek)) == []
    assert tensors_of(back)["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tensors_that_a_trainer_does_not_hold_come_from_the_original(deepseek, tmp_path):
    """Layers of multi-token prediction, where the trainer had none; and nothing where the original has no tensors."""
    original = shutil.copytree(deepseek, tmp_path / "original")
    megatron = go(run.hf_to_megatron(deepseek), tmp_path / "megatron")
    described = megatron / "release/.metadata"
    metadata = FileSystemReader(megatron / "release").read_metadata()
    for key in [key for key in metadata.state_dict_metadata if key.startswith("mtp.")]:
        del metadata.state_dict_metadata[key]
    described.write_bytes(pickle.dumps(metadata))
    assert same(tensors_of(go(run.megatron_to_hf(megatron, original), tmp_path / "all")), tensors_of(deepseek)) == []
    for file in original.glob("*.safetensors"):
        file.unlink()
    without = tensors_of(go(run.megatron_to_hf(megatron, original), tmp_path / "without"))
    assert [name for name in tensors_of(deepseek) if name not in without][0].startswith("model.layers.4.")
    assert not [name for name in without if name.startswith("model.layers.4.")]


# A target layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen", "deepseek"])
def test_a_rank_of_the_target_layout_finds_all_it_holds_in_files_of_its_own(request, tmp_path, model):
    source = request.getfixturevalue(model)
    conversion = run.hf_to_megatron(source, layout=LAYOUT)
    files = {int(Path(file.name).name.split("_")[2]): file for file in conversion.files}
    sizes = parse_layout(LAYOUT)
    assert sizes == Sizes(tensor=2, pipeline=2, expert=4, expert_tensor=1, data=2)
    layout = MegatronLayout(conversion.spec.table, sizes)
    for rank, file in files.items():
        found = Elements(conversion.spec.table)
        for piece in file.pieces:
            for rect in piece.place.part.rects:
                if (inside := clip(rect, piece.box)) is not None:
                    found.add(piece.place.part.sources[rect.source], inside)
        wanted = Elements(conversion.spec.table)
        for part in layout.held(rank):
            # A copy is stored once, with the original.
            if min(part.ranks) == rank and not part.copy:
                for rect in part.rects:
                    wanted.add(part.sources[rect.source], rect)
        assert [name for name in wanted.taken if not (wanted.taken[name] == found.taken[name]).all()] == [], rank


class Elements:
    """How often each element of a checkpoint is taken."""

    def __init__(self, table: Table):
        self.taken = {name: np.zeros(matrix(shape), np.int64) for name, shape in table.checkpoint().items()}

    def add(self, name: str, rect: Rect) -> None:
        rows, cols = rect.extent
        self.taken[name][rect.row : rect.row + rows : rect.step, rect.col : rect.col + cols] += 1


@pytest.mark.parametrize("text", ["tensor=0", "tensor", "data=2", "tensor=2,tensor=2", "tensor=x"])
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(SlimxError, match="no parallel size"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "sentence"), [("tensor=3", "cannot be split over 3"), ("pipeline=3", "does not divide"), ("expert=3", "3")]
)
def test_a_layout_that_does_not_fit_the_model_is_refused(qwen, text, sentence):
    with pytest.raises(SlimxError, match=sentence):
        Target(read_model(qwen).table, parse_layout(text))


# fp8 ------------------------------------------------------------------------------------------------------------------

BLOCK = 16


def in_fp8(deepseek: Path, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint with some matrices in blocks, and what it says in bf16, by the reference."""
    shutil.copytree(deepseek, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
    (directory / "config.json").write_text(json.dumps(config))
    stored, wanted = {}, {}
    for name, value in tensors_of(deepseek).items():
        stored[name] = wanted[name] = value
        if "_proj" in name:
            codes, scales = reference.quantise(value, RULE.IEEE, (BLOCK, BLOCK))
            stored[name], stored[name + "_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
            wanted[name] = reference.dequantise(codes, scales, (BLOCK, BLOCK), torch.bfloat16)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, wanted


@pytest.mark.parametrize("layout", ["", LAYOUT])
def test_fp8_sources_are_read_as_bf16(deepseek, tmp_path, layout):
    """With rows and columns cut off the edges of blocks, too."""
    source, wanted = in_fp8(deepseek, tmp_path / "fp8")
    megatron = go(run.hf_to_megatron(source, layout=layout), tmp_path / "megatron")
    back = go(run.megatron_to_hf(megatron, source), tmp_path / "hf")
    assert same(tensors_of(back), wanted) == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


WIDE = QWEN3_MOE | {"hidden_size": 136, "moe_intermediate_size": 128, "head_dim": 128, "num_experts": 2}
"""Rows in whole blocks of 128, columns that end inside one."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", ["ieee", "te", "ue8m0"])
def test_tensors_are_quantised_by_the_rule_and_the_others_left_alone(tmp_path, monkeypatch, rule, dtype):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 136 * 4 * 128)  # several blocks of rows per tensor
    source = write_checkpoint(tmp_path / "source", WIDE | {"num_hidden_layers": 1}, dtype)
    found = tensors_of(go(run.hf_to_fp8(source, rule=rule), tmp_path / "fp8"))
    wanted = {}
    for name, value in tensors_of(source).items():
        wanted[name] = value
        if "_proj" in name:
            codes, scales = reference.quantise(value, RULE[rule.upper()], (128, 128))
            wanted[name], wanted[name + "_scale_inv"] = codes.view(torch.float8_e4m3fn), scales
    assert same(found, wanted) == []
    described = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert described["weight_block_size"] == [128, 128] and described["quant_method"] == "fp8"
    assert set(described["modules_to_not_convert"]) >= {"lm_head", "model.layers.0.mlp.gate"}
    assert described.get("scale_fmt") == ("ue8m0" if rule == "ue8m0" else None)


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(qwen, tmp_path):
    with pytest.raises(SlimxError, match=r"q_proj.weight has 64 rows, no whole blocks of 128"):
        run.hf_to_fp8(qwen)
    source = write_checkpoint(tmp_path / "source", WIDE | {"num_hidden_layers": 1}, torch.float32)
    with pytest.raises(SlimxError, match="rule triton"):
        run.hf_to_fp8(source, rule="triton")


def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(tmp_path):
    source = write_checkpoint(tmp_path / "source", WIDE | {"num_hidden_layers": 1})
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SlimxError, match=r"experts\.1\.up_proj\.weight holds a value that is infinite"):
        go(run.hf_to_fp8(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# Bad input ------------------------------------------------------------------------------------------------------------


def spoil(source: Path, how: str) -> None:
    files = sorted(source.glob("*.safetensors"))
    index = source / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    if how == "missing shard":
        files[1].unlink()
    elif how == "truncated":
        with files[1].open("r+b") as file:
            file.truncate(files[1].stat().st_size - 100)
    else:
        tensors = load_file(files[0])
        name = next(iter(tensors))
        if how == "unknown tensor":
            tensors["model.extra"] = torch.zeros(3)
            where["model.extra"] = files[0].name
        elif how == "wrong shape":
            tensors[name] = tensors[name][1:].clone()
        else:
            del tensors[name], where[name]
        save_file(tensors, files[0], metadata={"format": "pt"})
        index.write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("missing shard", "model-00001.safetensors named in model.safetensors.index.json is missing"),
        ("truncated", "model-00001.safetensors: truncated"),
        ("unknown tensor", "tensor model.extra has no place in the model"),
        ("wrong shape", r"tensor model.embed_tokens.weight has shape \[119, 48\], its config.json wants \[120, 48\]"),
        ("missing tensor", "tensor model.embed_tokens.weight is missing"),
    ],
)
def test_a_damaged_source_is_one_sentence_and_nothing_is_written(qwen, tmp_path, how, sentence):
    source = shutil.copytree(qwen, tmp_path / "source")
    spoil(source, how)
    for make in (run.hf_to_megatron, run.hf_to_fp8):
        with pytest.raises(SlimxError, match=sentence):
            go(make(source), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("how", "sentence"), [("missing", r"__0_0\.distcp: is missing"), ("truncated", r"__0_0\.distcp: is truncated")]
)
def test_a_damaged_megatron_directory_is_one_sentence(qwen, tmp_path, how, sentence):
    megatron = go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    file = megatron / "release/__0_0.distcp"
    if how == "missing":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 10)
    with pytest.raises(SlimxError, match=sentence):
        run.megatron_to_hf(megatron, qwen)


def test_a_damaged_piece_is_named(qwen, tmp_path):
    megatron = go(run.hf_to_megatron(qwen), tmp_path / "megatron")
    with (megatron / "release/__0_0.distcp").open("r+b") as file:
        file.write(bytes(200))
    with pytest.raises(SlimxError, match=r"__0_0\.distcp: damaged at byte 0"):
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_tensor_that_is_not_whole_is_named(qwen, tmp_path):
    megatron = go(run.hf_to_megatron(qwen, layout=LAYOUT), tmp_path / "megatron")
    metadata = FileSystemReader(megatron / "release").read_metadata()
    del metadata.state_dict_metadata["decoder.layers.mlp.router.weight"].chunks[2]
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SlimxError, match=r"decoder\.layers\.mlp\.router\.weight is not whole"):
        go(run.megatron_to_hf(megatron, qwen), tmp_path / "out")


def test_a_target_that_exists_is_left_alone(qwen, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(SlimxError, match="is there already"):
        go(run.hf_to_megatron(qwen), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_too_small_a_disk_is_found_before_anything_is_written(qwen, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    small = os.statvfs_result([*real[:4], 100_000_000 // real.f_frsize, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    go(run.hf_to_megatron(qwen), tmp_path / "fits")
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:4], 10, *real[5:]]))
    with pytest.raises(SlimxError, match=r"has 0\.00 GB free, 0\.07 GB are needed"):
        go(run.hf_to_megatron(qwen), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fits"]


# Work -----------------------------------------------------------------------------------------------------------------


class Numbered:
    """A file of bytes that may fail, or end the process, in its middle."""

    def __init__(self, number: int, how: str = ""):
        self.name, self.nbytes, self.number, self.how = f"f{number}", 2000, number, how

    def write(self, stream: work.Stream) -> int:
        stream.write(bytes([self.number]) * 1000)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        stream.write(bytes([self.number]) * 1000)
        return self.number


class Numbers:
    """Four files; one may fail."""

    def __init__(self, how: str = "", which: int = 2, fingerprint: str = "numbers"):
        self.files = [Numbered(number, how if number == which else "") for number in range(4)]
        self.fingerprint = fingerprint

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, directory: Path, notes: Any) -> None:
        (directory / "notes").write_text(json.dumps(notes, sort_keys=True))


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_killed_conversion_goes_on_after_its_finished_files_and_gives_the_same_bytes(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_convert import Numbers; "
        "from slimx.convert.work import convert; convert(Numbers('kill'), Path(sys.argv[1]), threads=1, verify=False)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(command, env=environment, timeout=60).returncode == -signal.SIGKILL
    partial = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists() and (partial / "f2.writing").is_file()
    before = {name: (partial / name).stat().st_mtime_ns for name in ("f0", "f1")}
    convert(Numbers(), tmp_path / "out", threads=1, verify=True)
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before
    convert(Numbers(), tmp_path / "whole", threads=3, verify=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert content(tmp_path / "out").keys() == {"f0", "f1", "f2", "f3", "notes"}
    assert not partial.exists()


def test_a_disk_that_becomes_full_is_one_sentence_and_finished_files_wait(tmp_path):
    with pytest.raises(SlimxError, match="no space is left on its disk; make room and run the same command again"):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert {name for name in content(tmp_path / "out.partial") if "/" not in name} == {"f0", "f1"}
    with pytest.raises(SlimxError, match="no space"):
        convert(Numbers("full", which=0), tmp_path / "nothing", threads=1, verify=False)
    assert not (tmp_path / "nothing.partial").exists(), "nothing was finished, so nothing is left"


def test_the_partial_output_of_another_conversion_is_refused(tmp_path):
    with pytest.raises(SlimxError):
        convert(Numbers("full"), tmp_path / "out", threads=1, verify=False)
    with pytest.raises(SlimxError, match=r"out\.partial was begun by a conversion of other files"):
        convert(Numbers(fingerprint="others"), tmp_path / "out", threads=1, verify=False)
    convert(Numbers(), tmp_path / "out", threads=1, verify=False)


def test_two_processes_do_not_write_one_output(tmp_path):
    class Nested(Numbers):
        def finish(self, directory: Path, notes: Any) -> None:
            with pytest.raises(SlimxError, match="another process is writing it"):
                convert(Numbers(), tmp_path / "out", threads=1, verify=False)
            super().finish(directory, notes)

    convert(Nested(), tmp_path / "out", threads=1, verify=False)
    assert (tmp_path / "out/notes").is_file()


def test_bytes_that_changed_on_disk_are_found_by_verification(tmp_path):
    class Changed(Numbers):
        def finish(self, directory: Path, notes: Any) -> None:
            with (directory / "f1").open("r+b") as file:
                file.write(b"x")

    with pytest.raises(SlimxError, match=r"f1: has other bytes than were written"):
        convert(Changed(), tmp_path / "out", threads=1, verify=True)
    assert not (tmp_path / "out").exists()
    convert(Numbers(), tmp_path / "out", threads=1, verify=True)
    assert content(tmp_path / "out")["f1"] == b"\1" * 2000


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(qwen, tmp_path):
    result = CliRunner().invoke(app, ["convert", "hf-to-megatron", str(qwen), str(tmp_path / "m"), "--verify"])
    assert result.exit_code == 0, result.output
    assert "1 files" in result.output and "verified" in result.output
    arguments = ["convert", "megatron-to-hf", str(tmp_path / "m"), str(tmp_path / "hf"), "--original", str(qwen)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert same(tensors_of(tmp_path / "hf"), tensors_of(qwen)) == []
