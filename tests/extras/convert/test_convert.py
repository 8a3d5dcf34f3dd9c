"""Conversions on small checkpoints: bit for bit there and back, for any layout, and oracles in plain torch."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from slimx.errors import SlimxError
from slimx.extras.convert import run
from slimx.extras.convert.formats.torch_dist import clip
from slimx.extras.convert.target import Target, parse_layout
from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import matrix
from slimx.layout.ranks import Sizes
from slimx.layout.table import Table
from slimx.models.families import read_model
from slimx.models.files.reader import CheckpointReader
from tests.checkpoint_stand import QWEN3_MOE, same, tensors_of, write_checkpoint
from tests.extras.convert.convert_stand import LAYOUT, QWEN3, change, dtypes_of, fields, go
from tests.integration.megatron_stand import megatron_tensors, write_megatron
from tests.refusals import numbers, refused

MINIMAX_M2 = {key: value for key, value in QWEN3_MOE.items() if key not in ("num_experts", "moe_intermediate_size")} | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "rotary_dim": 8,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
}
SHARED_HEAD = "model.layers.4.shared_head.head.weight"


def stand_in(qwen: Path, *, per_layer: bool) -> dict[str, torch.Tensor]:
    """Builds the Megatron tensors with plain torch, with a vocabulary padded to 192 rows."""
    made = megatron_tensors(tensors_of(qwen), QWEN3_MOE, per_layer=per_layer)
    return {key: value.to(torch.bfloat16) for key, value in made.items()}


# There and back -------------------------------------------------------------------------------------------------------


GRID = pytest.mark.slow("full grid")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen", ""),
        ("qwen", "expert_tensor=2,expert=2"),
        ("deepseek", LAYOUT),
        pytest.param("qwen", LAYOUT, marks=GRID),
        pytest.param("deepseek", "", marks=GRID),
        pytest.param("deepseek", "expert_tensor=2,expert=2", marks=GRID),
    ],
)
def test_hugging_face_to_megatron_and_back_gives_every_bit(request, tmp_path, model, layout):
    source = request.getfixturevalue(model)
    megatron = go(run.hf_to_megatron(source, layout=layout, file_bytes=50_000), tmp_path / "megatron")
    back = go(run.megatron_to_hf(megatron, source, file_bytes=70_000), tmp_path / "hf")
    assert same(tensors_of(back), tensors_of(source)) == []
    assert len(list((megatron / "release").glob("*.distcp"))) > 3
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(source).keys()
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(("layers", "numbered"), [("auto", True), ("numbered", True), ("stacked", False)])
def test_the_megatron_directory_is_what_plain_torch_makes_of_the_tensors(qwen, tmp_path, layers, numbered):
    """A model with experts has numbered layers by default: scripts of slime and Miles give
    --moe-layer-freq as a list, and Megatron-LM looks for such keys where the metadata says so."""
    conversion = run.hf_to_megatron(qwen, layout=LAYOUT, layers=layers, file_bytes=50_000)
    megatron = go(conversion, tmp_path / "megatron")
    made = stand_in(qwen, per_layer=numbered)
    expected = {key: value[:120] if value.shape[0] == 192 else value for key, value in made.items()}
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(found, storage_reader=FileSystemReader(megatron / "release"), no_dist=True)
    assert same(found, expected) == []
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    common = torch.load(megatron / "release/common.pt", weights_only=False)
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    assert (common["args"].num_layers, common["args"].num_moe_experts, common["args"].padded_vocab_size) == (4, 8, 120)
    assert common["content_metadata"]["non_homogeneous_layers"] is numbered


def test_layers_that_differ_cannot_be_stacked_and_dense_ones_are(deepseek, tmp_path):
    with pytest.raises(SlimxError) as error:
        run.hf_to_megatron(deepseek, layers="stacked")
    assert (error.value.code, error.value.about) == ("convert.layers", "--layers")
    dense = write_checkpoint(tmp_path / "dense", QWEN3)
    assert [run.hf_to_megatron(dense, layers=layers).numbered for layers in ("auto", "numbered", "stacked")] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("kept", ["layernorm", "norm"])
def test_norms_over_all_heads_are_read_under_slimxs_or_slimes_key(tmp_path, kept):
    source = write_checkpoint(tmp_path / "source", MINIMAX_M2)
    megatron = go(run.hf_to_megatron(source), tmp_path / "megatron")
    metadata = FileSystemReader(megatron / "release").read_metadata()
    other = {"layernorm": "norm", "norm": "layernorm"}[kept]
    norms = [f"decoder.layers.{layer}.self_attention.{kind}_" for layer in range(2) for kind in "qk"]
    for key in norms:
        shapes = [metadata.state_dict_metadata[f"{key}{name}.weight"].size for name in ("layernorm", "norm")]
        assert shapes[0] == shapes[1]
        del metadata.state_dict_metadata[f"{key}{other}.weight"]
    (megatron / "release/.metadata").write_bytes(pickle.dumps(metadata))
    assert same(tensors_of(go(run.megatron_to_hf(megatron, source), tmp_path / "hf")), tensors_of(source)) == []


def test_a_stored_tied_output_layer_is_restored(tmp_path):
    """Published Qwen3-0.6B and 1.7B have tie_word_embeddings and lm_head.weight."""
    source = write_checkpoint(tmp_path / "source", QWEN3)
    assert "lm_head.weight" not in tensors_of(source)
    change(source, **{"lm_head.weight": tensors_of(source)["model.embed_tokens.weight"].clone()})
    megatron = go(run.hf_to_megatron(source), tmp_path / "megatron")
    assert "output_layer.weight" not in FileSystemReader(megatron / "release").read_metadata().state_dict_metadata
    back = go(run.megatron_to_hf(megatron, source), tmp_path / "hf")
    assert same(tensors_of(back), tensors_of(source)) == []
    reader = CheckpointReader(source)
    reader.check(read_model(source).table)
    reader.check_copies(read_model(source).table)


@pytest.mark.parametrize(("model", "name"), [("tied", "lm_head.weight"), ("deepseek", SHARED_HEAD)])
def test_a_copy_that_differs_in_one_bit_is_refused_by_name(deepseek, tmp_path, model, name):
    if model == "tied":
        source, original = write_checkpoint(tmp_path / "source", QWEN3), "model.embed_tokens.weight"
    else:
        source, original = shutil.copytree(deepseek, tmp_path / "source"), "lm_head.weight"
    copy = tensors_of(source)[original].clone()
    change(source, **{name: copy})
    megatron = go(run.hf_to_megatron(source), tmp_path / "megatron")
    copy.view(torch.int16)[-1, -1] ^= 1
    change(source, **{name: copy})
    for make in (run.hf_to_megatron, run.hf_to_fp8, lambda original: run.megatron_to_hf(megatron, original)):
        with pytest.raises(SlimxError) as error:
            make(source)
        assert (error.value.code, error.value.about) == ("checkpoint.copy", name)


def test_stored_keeps_every_bit_and_config_json_names_the_dtype(qwen, tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    mixed = shutil.copytree(qwen, tmp_path / "mixed")
    change(mixed, **{name: tensors_of(qwen)[name].float()})
    with pytest.raises(SlimxError) as error:
        run.hf_to_megatron(mixed)
    assert (error.value.code, error.value.about) == ("convert.dtypes", name)
    fields(mixed, dtype="bfloat16", torch_dtype="bfloat16")
    megatron = go(run.hf_to_megatron(mixed, dtype=torch.float32), tmp_path / "megatron")
    back = go(run.megatron_to_hf(megatron, mixed), tmp_path / "hf")
    assert set(dtypes_of(back).values()) == {"F32"}
    config = json.loads((back / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")


@pytest.mark.parametrize("per_layer", [False, True])
def test_stacked_layers_and_a_padded_vocabulary_are_read(qwen, tmp_path, per_layer):
    tensors = stand_in(qwen, per_layer=per_layer)
    # A tensor whose elements are stored in another order than its shape says.
    key = next(key for key in tensors if key.endswith("linear_proj.weight"))
    tensors[key] = tensors[key].transpose(-1, -2).contiguous().transpose(-1, -2)
    megatron = write_megatron(tmp_path / "megatron", tensors, tmp_path / "witness")
    back = go(run.megatron_to_hf(megatron, qwen), tmp_path / "hf")
    assert same(tensors_of(back), tensors_of(qwen)) == []
    assert not (tmp_path / "witness").exists()


def test_a_dtype_option_leaves_fixed_dtypes_unchanged(deepseek, tmp_path):
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
def test_each_rank_of_the_target_layout_reads_only_its_files(request, tmp_path, model):
    source = request.getfixturevalue(model)
    conversion = run.hf_to_megatron(source, layout=LAYOUT)
    files = {int(Path(file.name).name.split("_")[2]): file for file in conversion.files}
    sizes = parse_layout(LAYOUT)
    assert sizes == Sizes(tensor=2, pipeline=2, expert=4, expert_tensor=1, data=2)
    layout = MegatronLayout(conversion.spec.table, sizes)
    for rank, file in files.items():
        found = Elements(conversion.spec.table)
        for piece in file.pieces:
            for rect in piece.location.part.rects:
                if (inside := clip(rect, piece.box)) is not None:
                    found.add(piece.location.part.sources[rect.source], inside)
        expected = Elements(conversion.spec.table)
        for part in layout.parts_of(rank):
            # A copy is stored once, with the original.
            if min(part.ranks) == rank and not part.copy:
                for rect in part.rects:
                    expected.add(part.sources[rect.source], rect)
        assert [name for name in expected.taken if not (expected.taken[name] == found.taken[name]).all()] == [], rank


class Elements:
    """How often each element of a checkpoint is taken."""

    def __init__(self, table: Table):
        self.taken = {name: np.zeros(matrix(shape), np.int64) for name, shape in table.checkpoint_shapes().items()}

    def add(self, name: str, rect: Rect) -> None:
        rows, cols = rect.extent
        self.taken[name][rect.row : rect.row + rows : rect.step, rect.col : rect.col + cols] += 1


@pytest.mark.parametrize("text", ["tensor=0", "tensor", "data=2", "tensor=2,tensor=2", "tensor=x"])
def test_a_layout_that_is_none_is_refused(text):
    with refused("convert.layout", about="--layout"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "code"), [("tensor=3", "maps.share"), ("pipeline=3", "layout.pipeline"), ("expert=3", "layout.experts")]
)
def test_a_layout_that_does_not_fit_the_model_is_refused(qwen, text, code):
    with refused(code) as caught:
        Target(read_model(qwen).table, parse_layout(text))
    assert 3 in numbers(caught.value)
