"""Kimi-K2.5: where engines hold its tower, how its images are prepared, and what is refused. Its text and INT4 files:
tests/extras/families/test_kimi_and_mimo.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from slimx.config.sections.trainer import Vision
from slimx.extras.vision.images.processing import limits, load_processor, patches
from slimx.extras.vision.moonvit import KimiTower
from slimx.extras.vision.prompts.check import ModelImages, shows_images
from slimx.extras.vision.prompts.rows import RowImages
from slimx.extras.vision.towers.rows import Matrices
from slimx.layout.engine import EngineLayout
from slimx.layout.maps import Rect
from slimx.layout.megatron import MegatronLayout
from slimx.layout.parts import check_coverage, matrix
from slimx.layout.ranks import EngineSizes, Sizes
from tests.extras.vision.vision_stand import changed, read, run, seeing
from tests.function_call import call_with_sglang
from tests.integration.engine_families import MODELS
from tests.integration.vision_oracle import KIMI_PROCESSOR
from tests.published import published
from tests.refusals import refused
from tests.unit.adapters.sglang_ranks import built, described, join, pretend_hopper

TINY = MODELS["kimi_k25"]
CASES = (
    (EngineSizes(), 0),
    (EngineSizes(tensor=2), 1),
    (EngineSizes(tensor=2, expert=2), 1),
    (EngineSizes(tensor=4, attention_data=2), 3),
)
"""Sizes of an engine, and the rank that is built."""


# Trainers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_first_stage_holds_the_whole_tower_once(tmp_path: Path, tensor: int):
    spec = read(tmp_path, TINY)
    parts = list(MegatronLayout(spec.table, Sizes(tensor=tensor, pipeline=3)).parts())
    check_coverage(spec.table.sources(), parts)
    assert {part.ranks[0] for part in parts if part.name.startswith("visual.")} == {0}


def test_a_trainers_tower_has_the_parameters_of_the_table(tmp_path: Path):
    spec = seeing(run(tmp_path, "kimi_k25"))
    tower = spec.layer_kind.inputs.tower
    module = KimiTower(KimiTower.config_class(**tower.fields))
    found = {f"visual.{name}": tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert found == {row.name: row.sources[0][1] for row in spec.layer_kind.rows}
    assert tower.axes is None and tower.merge == 2 and tower.levels == 0


@pytest.mark.parametrize(
    ("train", "moved"), [("none", set()), ("projector", {"mm_projector"}), ("tower", {"mm_projector", "vision_tower"})]
)
def test_the_projector_can_be_trained_alone(tmp_path: Path, train: str, moved: set[str]):
    spec = seeing(run(tmp_path, "kimi_k25", trainer={"vision": {"train": train}}))
    frozen = {source for sources in spec.frozen(()) for source in sources}
    tower = {name for name in spec.table.sources() if not name.startswith("language_model.")}
    assert {name.split(".")[0] for name in tower - frozen} == moved


def test_a_stack_of_matrices_is_read_matrix_by_matrix():
    assert Matrices(2).local([(6, 5)], None, 0, 1) == ((6, 5), [Rect(0, 0, 0, 3, 5, 0, 0), Rect(0, 3, 0, 3, 5, 3, 0)])


# Engines --------------------------------------------------------------------------------------------------------------


def served(path: str, rank: int, tensor: int, expert: int, copies: int, weights: str | None) -> dict[str, Any]:
    """Returns one rank of SGLang's model of `path`, described, or writes its parameters to the file `weights`."""
    from sglang.srt.layers import linear, vocab_parallel_embedding

    pretend_hopper()
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration

    linear._is_cpu = vocab_parallel_embedding._is_cpu = False  # a CPU pads otherwise
    arguments = {"ep_size": expert, "dp_size": copies, "enable_dp_attention": copies > 1}
    device = "meta" if weights is None else "cpu"
    model = built(join(path, rank, tensor, **arguments), device, kind=KimiK25ForConditionalGeneration)
    if weights is None:
        return described(model)
    for parameter in model.parameters():
        parameter.data.fill_(7)
    model.load_weights(load_file(f"{path}/model.safetensors").items())
    save_file({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, weights)
    return {}


def test_the_engines_kimi_has_the_tensors_of_the_table(tmp_path: Path):
    """As in test_gated_towers.py, for latent attention."""
    spec = read(tmp_path, TINY)
    for sizes, rank in CASES:
        found = call_with_sglang(served, spec.path, rank, sizes.tensor, sizes.expert, sizes.attention_data, None)
        parts = [part for part in EngineLayout(spec.engine_table(), sizes).parts() if rank in part.ranks]
        assert found["parameters"] == {part.name: [list(part.shape), part.dtype or "bfloat16"] for part in parts}
        assert found["uncovered"] == {}
        assert found["places"] == {name: list(shape) for name, shape in spec.table.checkpoint_shapes().items()}
        assert found["held"] == sorted(
            [part.name, part.sources[r.source], r.row, r.col, r.rows, r.cols, r.local_row, r.local_col]
            for part in parts
            for r in part.rects
        )


def test_a_kimi_engine_that_loads_a_checkpoint_holds_what_the_table_says(tmp_path: Path):
    spec = read(tmp_path, TINY)
    shapes = spec.table.checkpoint_shapes()
    weights = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    call_with_sglang(served, spec.path, 1, 2, 1, 1, str(tmp_path / "loaded"))
    loaded = load_file(tmp_path / "loaded")
    for part in EngineLayout(spec.engine_table(), EngineSizes(tensor=2)).parts():
        if 1 not in part.ranks:
            continue
        local = torch.zeros(matrix(part.shape))
        for r in part.rects:
            source = weights[part.sources[r.source]]
            piece = source.view(matrix(source.shape))[r.row : r.row + r.rows, r.col : r.col + r.cols]
            local[r.local_row : r.local_row + r.rows, r.local_col : r.local_col + r.cols] = piece
        assert torch.equal(loaded.pop(part.name).view(local.shape).float(), local), part.name
    assert not loaded


def test_fused_shared_experts_of_kimi_have_their_nested_names(tmp_path: Path):
    parts = EngineLayout(read(tmp_path, TINY).engine_table(fused_shared_experts=True), EngineSizes()).parts()
    down = next(part for part in parts if part.name.endswith("experts.w2_weight"))
    assert down.sources[-1] == "language_model.model.layers.1.mlp.shared_experts.down_proj.weight"


@pytest.mark.parametrize("size", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_an_engine_whose_tower_would_have_another_size_is_refused(tmp_path: Path, size: str):
    """SGLang reads the names without vt_, which published files lack because their values are its defaults."""
    (tmp_path / "tiny").mkdir()
    spec = read(tmp_path / "tiny", changed("kimi_k25", "vision_config", size, value=None))
    with refused("model.served_field", about=f"vision_config.{size}"):
        spec.engine_table()
    assert read(tmp_path, published("Kimi-K2.5")).engine_table().rows


# Images ---------------------------------------------------------------------------------------------------------------


def write_processor(directory: Path, **fields: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY))
    config = {**KIMI_PROCESSOR, "media_proc_cfg": {**KIMI_PROCESSOR["media_proc_cfg"], **fields}}
    (directory / "preprocessor_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("fields", "vision", "size", "grid"),
    [
        ({}, {}, (131, 90), (8, 10)),  # padded to multiples of 28
        ({"in_patch_limit": 20}, {}, (131, 90), (4, 6)),
        ({"patch_limit_on_one_side": 4}, {}, (131, 90), (4, 4)),
        ({"patch_size": 7}, {}, (131, 90), (14, 20)),
        ({}, {"max_pixels": 20 * 14 * 14}, (131, 90), (4, 6)),
    ],
)
def test_images_have_the_size_that_published_files_say(tmp_path: Path, fields: Any, vision: Any, size: Any, grid: Any):
    chosen = limits(Vision(**vision))
    model = write_processor(tmp_path / "model", **fields)
    processor = load_processor(str(model), chosen)
    pixels, found = patches(processor, Image.fromarray(np.full((size[1], size[0], 3), 255, np.uint8)))
    side = fields.get("patch_size", 14)
    assert found == (1, *grid) and pixels.shape == (grid[0] * grid[1], 3, side, side) and pixels[0].min() == 1.0
    rows = RowImages(None)
    rows.sizes["x"] = size
    assert shows_images(str(model))
    assert ModelImages(str(model), rows, chosen).tokens_of("x") == grid[0] * grid[1] // 4


@pytest.mark.parametrize(
    ("fields", "vision", "code", "about"),
    [
        ({"fixed_output_tokens": 64}, {}, "vision.processor", "media_proc_cfg.fixed_output_tokens"),
        ({}, {"min_pixels": 1000}, "vision.min_pixels", "trainer.vision.min_pixels"),
    ],
)
def test_limits_that_the_processor_lacks_are_refused(tmp_path: Path, fields: Any, vision: Any, code: str, about: str):
    model = write_processor(tmp_path / "model", **fields)
    with refused(code, about=about):
        load_processor(str(model), limits(Vision(**vision)))


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("vision_config", "video_attn_type"), "spatial"),
        (("vision_config", "pos_emb_type"), "fixed"),
        (("vision_config", "merge_type"), "other"),
        (("vision_config", "mm_projector_type"), "mlp"),
        (("vision_config", "projector_hidden_act"), "silu"),
        (("vision_config", "projector_ln_eps"), 1e-6),
        (("vision_config", "merge_kernel_size"), [2, 1]),
        (("vision_config", "init_pos_emb_width"), 4),
        (("vision_config", "mm_hidden_size"), 32),
        (("vision_config", "text_hidden_size"), 64),
        (("vision_config", "vt_num_attention_heads"), 3),
        (("text_config", "attention_bias"), True),
        (("projection_hidden_size",), 1152),
        (("image_token_id",), 5),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_a_kimi_that_would_be_built_otherwise_is_refused(tmp_path: Path, path: tuple[str, ...], value: Any):
    with refused("model.unsupported", about=".".join(path)):
        read(tmp_path, changed("kimi_k25", *path, value=value))
