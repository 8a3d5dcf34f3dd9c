"""Directories of Megatron-LM: which checkpoint they hold, and what of their pickles is read."""

from __future__ import annotations

import argparse
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slimx.errors import SlimxError
from slimx.extras.megatron_files.common import read_common, saved_vocabulary
from slimx.extras.megatron_files.directory import find_checkpoint, is_megatron
from slimx.extras.megatron_files.format import MegatronFormat
from slimx.models.files.formats import format_of
from slimx.models.files.safe_pickle import read_metadata, safe_classes
from slimx.models.files.torch_dist import TRACKER
from tests.refusals import refused


def megatron(directory: Path, name: str, backend: str = "torch_dist") -> Path:
    (directory / name).mkdir(parents=True)
    (directory / name / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    return directory


@pytest.mark.parametrize(("content", "name"), [("release", "release"), ("12\n", "iter_0000012")])
def test_the_tracker_says_which_checkpoint(tmp_path, content, name):
    directory = megatron(tmp_path / "m", name)
    (directory / "latest_checkpointed_iteration.txt").write_text(content)
    assert is_megatron(directory) and find_checkpoint(directory) == directory / name
    assert is_megatron(directory / name) and find_checkpoint(directory / name) == directory / name


def test_a_hugging_face_directory_is_not_megatrons(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not is_megatron(tmp_path)


def test_the_core_finds_the_format_of_a_directory(tmp_path):
    assert format_of(megatron(tmp_path / "m", "release")) is None
    (tmp_path / "m" / TRACKER).write_text("release")
    assert isinstance(format_of(tmp_path / "m"), MegatronFormat)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        (TRACKER, b"x", "megatron.tracker"),
        (TRACKER, b"13", "megatron.tracker"),
        (TRACKER, b"\xff", "megatron.tracker"),
        (TRACKER, b"1" * 5000, "megatron.tracker"),
        ("iter_0000012/metadata.json", None, "megatron.format"),
        ("iter_0000012/metadata.json", b"{", "checkpoint.json"),
        ("iter_0000012/metadata.json", b"[" * 100_000, "checkpoint.json"),
        ("iter_0000012/metadata.json", b"[]", "checkpoint.json"),
        ("iter_0000012/metadata.json", b"{}", "megatron.format"),
        ("iter_0000012/metadata.json", b'{"sharded_backend": "zarr"}', "megatron.format"),
    ],
)
def test_a_directory_that_holds_nothing_to_load_is_refused(tmp_path, name, content, code):
    directory = megatron(tmp_path / "m", "iter_0000012")
    (directory / TRACKER).write_text("12")
    file = directory / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(SlimxError) as error:
        find_checkpoint(directory)
    assert error.value.code == code
    assert error.value.about == str(file.parent if content is None else file)


def test_megatrons_old_format_is_named(tmp_path):
    (tmp_path / "iter_0000012" / "mp_rank_00").mkdir(parents=True)
    assert is_megatron(tmp_path / "iter_0000012")
    with refused("megatron.format", about=str(tmp_path / "iter_0000012")):
        find_checkpoint(tmp_path / "iter_0000012")


# Pickles --------------------------------------------------------------------------------------------------------------


class Call:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_torch_is_read_as_torch_reads_it(tmp_path):
    dcp.save({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": "text"}, checkpoint_id=tmp_path, no_dist=True)
    assert read_metadata(tmp_path / ".metadata") == pickle.loads((tmp_path / ".metadata").read_bytes())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (lambda path: pickle.dumps(Call(Path.touch, path / "witness")), "pathlib.Path.touch|builtins.getattr"),
        (lambda path: pickle.dumps(Call(eval, "1")), "builtins.eval"),
        (lambda path: b"\x80\x04\x8c\x05torch\x8c\x0ahub.os.sep\x93.", "torch.hub.os.sep"),
        (lambda path: pickle.dumps(torch.Size([1])), "Size"),
        (lambda path: b"truncated", ".metadata"),
    ],
)
def test_metadata_that_names_anything_else_is_refused_and_nothing_runs(tmp_path, content, named):
    (tmp_path / ".metadata").write_bytes(content(tmp_path))
    with refused("megatron.metadata", about=str(tmp_path / ".metadata")) as error:
        read_metadata(tmp_path / ".metadata")
    assert re.search(named, str(error.value))
    assert not (tmp_path / "witness").exists()


def described(**changed: Any) -> Metadata:
    """Returns the metadata of one tensor, with fields changed anywhere in it."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4, 2]), [chunk])
    place, metadata = _StorageInfo("__0_0.distcp", 0, 100), Metadata({"a": tensor}, {"a": ("a",)}, {})
    metadata.storage_data = {MetadataIndex("a", torch.Size([0, 0])): place}
    for part in (chunk, tensor, place, metadata):
        for name in changed.keys() & vars(part).keys():
            object.__setattr__(part, name, changed[name])
    return metadata


@pytest.mark.parametrize(
    "changed",
    [
        {"state_dict_metadata": None},
        {"state_dict_metadata": [1]},
        {"state_dict_metadata": {"a": "b"}},
        {"state_dict_metadata": {5: BytesStorageMetadata()}},
        {"storage_data": None},
        {"storage_data": {"a": 1}},
        {"size": None},
        {"size": "ab"},
        {"size": torch.Size([3, 2])},
        {"properties": None},
        {"chunks": None},
        {"chunks": [None]},
        {"sizes": torch.Size([4])},
        {"offsets": torch.Size([-1, 0])},
        {"offsets": torch.Size([1, 0])},
        {"relative_path": "/etc/passwd"},
        {"relative_path": "../__0_0.distcp"},
        {"relative_path": 3},
        {"offset": -1},
        {"length": "x"},
    ],
    ids=str,
)
def test_metadata_that_no_writer_writes_is_refused(tmp_path, changed):
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(described()))
    assert list(read_metadata(file).state_dict_metadata) == ["a"]
    file.write_bytes(pickle.dumps(described(**changed)))
    with pytest.raises(SlimxError) as error:
        read_metadata(file)
    assert (error.value.code, error.value.about) == ("megatron.metadata", str(file))


def test_metadata_is_read_from_common_pt_and_from_the_tensors(tmp_path):
    """megatron-core 0.19 writes no `common.pt`, but a list of one dictionary among the tensors."""
    common = {"args": argparse.Namespace(vocab_size=77), "iteration": 3}
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "none", no_dist=True)
    with pytest.raises(FileNotFoundError):
        read_common(tmp_path / "none")
    among = {"w": torch.zeros(2), "common_state/shard_0_1": [common]}
    dcp.save(among, checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    assert read_common(tmp_path) == common and saved_vocabulary(tmp_path) == 77
    torch.save({"args": argparse.Namespace(vocab_size=78)}, tmp_path / "common.pt")
    assert saved_vocabulary(tmp_path) == 78


@pytest.mark.parametrize("before", [[], [argparse.Namespace]], ids=["none", "megatron-core's"])
def test_classes_that_torch_read_before_are_those_that_it_reads_afterwards(tmp_path, before):
    """megatron-core lets Namespace in when it is imported, and its own loader needs it after slimx has read."""
    torch.save({"args": argparse.Namespace(vocab_size=78)}, tmp_path / "common.pt")
    with safe_classes(*before):
        known = set(torch.serialization.get_safe_globals())
        assert read_common(tmp_path)["args"].vocab_size == 78
        assert set(torch.serialization.get_safe_globals()) == known
