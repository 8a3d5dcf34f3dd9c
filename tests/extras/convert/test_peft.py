"""Adapters that cannot be exported are refused by name; that exported ones are right is in
tests/integration/test_lora.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from typer.testing import CliRunner

from slimx.errors import SlimxError
from slimx.extras.convert import run
from slimx.extras.convert.command import app
from slimx.extras.convert.formats.peft import export_adapters
from slimx.extras.convert.formats.torch_dist_reader import read_whole
from slimx.layout.maps import Rect
from slimx.models.files.reader import CheckpointReader
from tests.extras.convert.convert_stand import LAYOUT, go
from tests.refusals import refused

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
KEY = "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"


@pytest.fixture(scope="module")
def megatron(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns `qwen` in many pieces; no test writes into it."""
    return go(run.hf_to_megatron(qwen, layout=LAYOUT), tmp_path_factory.mktemp("peft") / "megatron")


def test_a_checkpoint_without_adapters_is_refused(megatron, qwen, tmp_path):
    with refused("convert.no_adapters", about=str(megatron / "release")):
        export_adapters(megatron, tmp_path / "out", qwen, 8.0)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_export_was_never_compared_is_refused(megatron, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with refused("convert.peft_family", about=str(tmp_path)):
        export_adapters(megatron, tmp_path / "out", tmp_path, 8.0)


def test_the_command_refuses_a_checkpoint_that_no_run_wrote(megatron, qwen, tmp_path):
    result = CliRunner().invoke(
        app, ["adapters-to-peft", str(megatron), str(tmp_path / "out"), "--original", str(qwen)]
    )
    assert isinstance(result.exception, SlimxError) and not (tmp_path / "out").exists()


def test_a_tensor_is_read_whole_from_its_pieces_or_named(megatron, qwen, tmp_path):
    path, source = megatron / "release", CheckpointReader(qwen)
    metadata = FileSystemReader(path).read_metadata()
    chunks = metadata.state_dict_metadata[KEY].chunks
    found = read_whole(path, KEY, metadata)
    assert len(chunks) > 1
    for number, expert in enumerate(found):
        name = f"model.layers.2.mlp.experts.{number}.down_proj.weight"
        rows, cols = source.shape(name)
        assert torch.equal(expert, source.read(name, Rect(0, 0, 0, rows, cols, 0, 0)))
    del chunks[1]
    with refused("megatron.incomplete", about=KEY):
        read_whole(path, KEY, metadata)
    lost = metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == KEY)].relative_path
    with refused("megatron.file", about=lost):
        read_whole(tmp_path, KEY, metadata)
