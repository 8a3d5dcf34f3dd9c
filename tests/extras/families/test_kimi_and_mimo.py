"""Kimi-K2.5 and MiMo-7B: models known from elsewhere in files of their own, in INT4 or with more tensors than a trainer
holds."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from slimx.extras.convert import run
from slimx.extras.convert.work import convert
from slimx.extras.families import mimo
from slimx.extras.low_precision import int4
from slimx.extras.vision.families import kimi_k25
from slimx.layout.maps import Rect
from slimx.models.families import read_model
from slimx.models.files.reader import CheckpointReader
from slimx.models.files.writer import finish_directory
from tests.published import published
from tests.refusals import refused
from tests.unit.models.test_families import QWEN25_7B

PUBLISHED: dict[str, Any] = published("Kimi-K2.5")
SMALL = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}
VISION = {
    "vt_hidden_size": 8,
    "vt_intermediate_size": 12,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 1,
    "mm_hidden_size": 8,
    "text_hidden_size": 64,
}
KIMI = PUBLISHED | {
    "text_config": PUBLISHED["text_config"] | SMALL,
    "vision_config": PUBLISHED["vision_config"] | VISION,
}
MIMO: dict[str, Any] = {key: value for key, value in QWEN25_7B.items() if "sliding" not in key} | {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 640000,
    "vocab_size": 151680,
}
"""config.json of XiaomiMiMo/MiMo-7B-Base."""
EXPERT = "language_model.model.layers.1.mlp.experts.2.down_proj.weight"
Tensors = dict[str, torch.Tensor]
SMALL_MIMO = (
    MIMO
    | {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
)


def write(directory: Path, hf: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def random_tensors(table: Any, without: Collection[str] = ()) -> Tensors:
    """Returns a bf16 checkpoint with everything that a table holds and carries over."""
    shapes = {
        **table.checkpoint_shapes(),
        **table.frozen,
    }
    with_dtype = {name for entry in table.entries() if entry.row.dtype for name in entry.sources}
    made = {name: torch.randn(shape) for name, shape in shapes.items() if name not in without}
    return {name: tensor if name in with_dtype else tensor.bfloat16() for name, tensor in made.items()}


@pytest.fixture(scope="module")
def published_kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A small Kimi-K2.5 with experts in INT4 as compressed-tensors packs them, and all its tensors in bf16."""
    directory = tmp_path_factory.mktemp("kimi")
    table = kimi_k25.MOE.weight_table(KIMI)
    experts = [name for name in table.checkpoint_shapes() if ".experts." in name]
    stored, plain = random_tensors(table, experts), {}
    for name in experts:
        rows, cols = table.checkpoint_shapes()[name]
        codes = torch.randint(-8, 8, (rows, cols), dtype=torch.int8)
        scales = torch.rand(rows, cols // 32).bfloat16()
        packed = pack_to_int32(codes, 4).contiguous()
        stored |= {name + "_packed": packed, name + "_scale": scales, name + "_shape": torch.tensor([rows, cols])}
        plain[name] = codes.bfloat16() * scales.repeat_interleave(32, 1)
    whole = {name: tensor for name, tensor in stored.items() if not name.startswith(tuple(experts))} | plain
    return write(directory, KIMI, stored), whole


# What the published files hold ----------------------------------------------------------------------------------------


def test_the_published_kimi_files_hold_as_many_tensors_and_elements():
    """208,550 tensors of 170,738,182,128 elements, eight codes counted as one, as the headers of its 64 files say."""
    table = kimi_k25.MOE.weight_table(PUBLISHED)
    shapes = dict(table.frozen)
    for name, shape in table.checkpoint_shapes().items():
        packed = int4.packed_shapes(shape) if ".experts." in name else {"": shape}
        shapes |= {name + suffix: part_shape for suffix, part_shape in packed.items()}
    assert len(shapes) == 208_550 and sum(map(math.prod, shapes.values())) == 170_738_182_128
    assert kimi_k25.MOE.unsupported(PUBLISHED) is None


def test_mimo_has_the_published_number_of_parameters():
    table = mimo.weight_table(MIMO)
    names = {name.removeprefix("model.mtp_layers.0.") for name in table.frozen}
    assert {"input_proj.weight", "token_layernorm.weight", "self_attn.q_proj.bias", "mlp.down_proj.weight"} < names
    shapes = [*table.checkpoint_shapes().values(), *table.frozen.values()]
    assert round(sum(map(math.prod, shapes)) / 1e9, 2) == 7.83


# INT4 -----------------------------------------------------------------------------------------------------------------


def test_int4_is_read_as_compressed_tensors_packs_it(published_kimi: tuple[Path, Tensors]):
    directory, expected = published_kimi
    reader = CheckpointReader(directory)
    reader.check(read_model(directory).table)
    assert reader.dtype(EXPERT) == torch.bfloat16
    tensor = expected[EXPERT]
    rows, cols = tensor.shape
    for rect in (Rect(0, 0, 0, rows, cols, 0, 0), Rect(0, 3, 5, 7, 20, 0, 0), Rect(0, 1, 9, 4, 23, 0, 0, step=2)):
        part = expected[EXPERT][
            rect.row : rect.row + rect.rows * rect.step : rect.step, rect.col : rect.col + rect.cols
        ]
        assert torch.equal(reader.read(EXPERT, rect), part)


@pytest.mark.parametrize(
    ("suffix", "damage", "code"),
    [
        ("_packed", lambda tensor: tensor[:, :-1].contiguous(), "checkpoint.shape"),
        ("_scale", lambda tensor: tensor[:, :0].contiguous(), "checkpoint.shape"),
        ("_scale", lambda tensor: tensor.float(), "checkpoint.dtype"),
        ("_packed", lambda tensor: tensor.float(), "checkpoint.dtype"),
        ("_scale", None, "checkpoint.missing"),
    ],
)
def test_a_damaged_int4_matrix_is_refused_by_name(tmp_path: Path, published_kimi, suffix: str, damage: Any, code: str):
    stored = load_file(published_kimi[0] / "model.safetensors")
    tensor = stored.pop(EXPERT + suffix)
    directory = write(
        tmp_path / "damaged", KIMI, stored if damage is None else stored | {EXPERT + suffix: damage(tensor)}
    )
    with refused(code, about=EXPERT + suffix):
        CheckpointReader(directory).check(read_model(directory).table)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_bits", 8), ("symmetric", False), ("group_size", 128), ("actorder", "group"), ("type", "float")],
)
def test_another_scheme_of_quantization_is_refused_by_its_field(tmp_path: Path, field: str, value: Any):
    hf = copy.deepcopy(KIMI)
    hf["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(hf))
    about = f"text_config.quantization_config.config_groups.group_0.weights.{field}"
    with refused("model.unsupported", about=about):
        read_model(tmp_path)


# Conversions and exports ----------------------------------------------------------------------------------------------


def there_and_back(source: Path, tmp_path: Path) -> tuple[Tensors, dict[str, Any]]:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    convert(run.hf_to_megatron(source, layout="tensor=2"), megatron, threads=1, verify=True)
    convert(run.megatron_to_hf(megatron, source), back, threads=1, verify=True)
    tensors = {name: tensor for file in back.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return tensors, json.loads((back / "config.json").read_text())


def differing(found: Tensors, expected: Tensors) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def test_a_kimi_in_int4_comes_back_in_bf16_with_its_vision_tower(tmp_path: Path, published_kimi):
    source, expected = published_kimi
    found, config = there_and_back(source, tmp_path)
    assert differing(found, expected) == []
    assert any(name.startswith("vision_tower.") for name in found)
    assert "quantization_config" not in config and "quantization_config" not in config["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).table == kimi_k25.MOE.weight_table(KIMI)


def test_a_mimo_comes_back_with_its_prediction_layer(tmp_path: Path):
    hf = SMALL_MIMO
    expected = random_tensors(mimo.weight_table(hf))
    assert any("mtp_layers" in name for name in expected)
    found, _ = there_and_back(write(tmp_path / "source", hf, expected), tmp_path)
    assert differing(found, expected) == []


def test_buffers_of_any_shape_are_carried_over(tmp_path: Path):
    """The frequencies of Kimi-K2's published files have hidden size / heads / 2 elements."""
    hf = SMALL_MIMO
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(7) for layer in range(2)}
    expected = random_tensors(mimo.weight_table(hf)) | buffers
    found, _ = there_and_back(write(tmp_path / "source", hf, expected), tmp_path)
    assert differing(found, expected) == []
    out = tmp_path / "out"
    out.mkdir()
    finish_directory(out, tmp_path / "source", mimo.weight_table(hf), [], weights=tmp_path / "source")
    carried = load_file(out / "model-carried-00001.safetensors")
    assert differing({name: carried[name] for name in buffers}, buffers) == []


def test_there_is_no_fp8_form_of_kimi(published_kimi):
    with refused("convert.fp8"):
        run.hf_to_fp8(published_kimi[0])


# Engines --------------------------------------------------------------------------------------------------------------


def test_engines_of_mimo_are_refused_by_name():
    with refused("model.no_engine", about=mimo.ARCHITECTURE):
        mimo.engine_table(MIMO)


def test_prediction_layers_of_mimo_are_not_trained(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    with refused("model.mtp_layers", about="trainer.megatron.mtp_num_layers"):
        read_model(tmp_path, mtp_layers=1)
