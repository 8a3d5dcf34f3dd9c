"""Real trainers of a vision-language model hold the memory that `slimx plan` predicts: state to the byte, and the peak
of micro-batches that consist of images within 15%."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slimx.config.schema import Config
from slimx.data.batch import MicroBatch, TrainingRow
from slimx.data.packing import pack
from slimx.data.records import Image
from slimx.extras.planner.memory.state import Buffers
from slimx.extras.planner.memory.trainer import holdings, trainer_memory
from slimx.extras.vision.images.store import ImageStore
from slimx.layout.ranks import Sizes, coordinates, sizes_of
from slimx.models.families import configured_model, read_model
from tests.integration.deepseek_checkpoint import DEEPSEEK
from tests.integration.rank_processes import run_ranks
from tests.integration.rank_start import join, leave
from tests.integration.test_plan_memory import WITHIN, LiveMemory

pytestmark = pytest.mark.integration
GRID, LENGTH, TOKENS, ROWS = (1, 18, 28), 128, 512, 8
"""Patches of the one image of each rollout, whose placeholders are all but two of its tokens; tokens of a rollout and
of a micro-batch; rollouts of a data-parallel rank's step."""
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 3, 3], "mrope_interleaved": True},
}
TOWER = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 240,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
SHARED = TOWER.keys() - {"num_position_embeddings", "deepstack_visual_indexes"}
MODEL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 120,
    "tie_word_embeddings": False,
    "text_config": TEXT,
    "vision_config": TOWER,
}
GATED = {
    **MODEL,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": {key: value for key, value in TEXT.items() if key not in ("head_dim", "rope_scaling")}
    | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "vision_config": {key: value for key, value in TOWER.items() if key in SHARED}
    | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
}
"""A model whose tower has gated MLPs and RMSNorms."""

MOONVIT = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 120,
    "tie_word_embeddings": False,
    # One head, because plans count its scores as if the tokens of a micro-batch were one sequence.
    "text_config": {**DEEPSEEK, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1},
    "vision_config": {
        "vt_hidden_size": 64,
        "vt_intermediate_size": 240,
        "vt_num_hidden_layers": 4,
        "vt_num_attention_heads": 4,
        "init_pos_emb_height": 6,
        "init_pos_emb_width": 6,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 64,
        "patch_size": 4,
        "text_hidden_size": 128,
    },
}
"""A model whose tower has a projector of its own class, and patches of one frame."""


def case(train: str, dtype: str = "bfloat16", **trainer: Any) -> dict[str, Any]:
    return {"dtype": dtype, "trainer": {**trainer, "vision": {"train": train}}}


FULL = {"recompute": {"granularity": "full"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {
        "layout": {"world_size": 1},
        "cases": [
            case("none"),
            case("none", **FULL),
            case("projector", **FULL),
            case("tower"),
            case("none", "float32", **FULL),
            case("tower", "float32", **FULL),
        ],
    },
    "gated": {
        "model": GATED,
        "layout": {"world_size": 1},
        "cases": [case("none"), case("tower"), case("tower", "float32", **FULL)],
    },
    "moonvit": {
        "model": MOONVIT,
        "patch": (3, 4, 4),
        "layout": {"world_size": 1},
        "cases": [case("none"), case("projector"), case("tower"), case("tower", "float32", **FULL)],
    },
    "TP2xDP2": {"layout": {"world_size": 4, "tensor": 2}, "cases": [case("projector"), case("tower", **FULL)]},
    "PP2xCP2": {"layout": {"world_size": 4, "pipeline": 2, "context": 2}, "cases": [case("none"), case("tower")]},
}


def write_model(directory: Path, hf: dict[str, Any]) -> None:
    """Writes a checkpoint of random weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf))
    shapes = read_model(directory).table.checkpoint_shapes()
    generator = torch.Generator().manual_seed(1)
    tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def config(job: dict[str, Any], case: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(job["out"])},
            "model": {"path": str(job["model"])},
            "numerics": {"dtype": case["dtype"]},
            "cluster": {"device": "cpu"},
            "trainer": {"max_tokens_per_microbatch": TOKENS, **job["layout"], **case["trainer"]},
            "rollout": {"prompts": "p", "prompts_per_step": job["rows"], "group_size": 1, "engines": []},
            "algorithm": {"name": "sft"},
        }
    )


def micro_batches(settings: Config, sizes: Sizes, data: int) -> list[MicroBatch]:
    """Returns this data-parallel rank's part of a step whose rollouts each consist of a different image."""
    random = np.random.default_rng(1)
    count = settings.rollout.prompts_per_step
    rows = []
    for index in range(count):
        tokens = np.full(LENGTH, MODEL["image_token_id"])
        tokens[[0, -1]] = 1, 2
        row = TrainingRow(
            tokens=tokens,
            labels=random.integers(1, 100, LENGTH),
            weight=np.full(LENGTH, 1 / (LENGTH * count), np.float32),
            advantages=np.ones(LENGTH, np.float32),
            rollout_logprobs=np.zeros(LENGTH, np.float32),
            versions=np.zeros(LENGTH, np.int64),
            temperature=np.ones(LENGTH, np.float32),
            images=[Image(start=1, stop=LENGTH - 1, grid=GRID, digest=f"{index:02x}")],
        )
        rows.append(row)
    return pack(
        rows,
        data_size=sizes.data,
        max_tokens=TOKENS,
        multiple_of=sizes.tensor * sizes.context,
        sequence_multiple=sizes.sequence_multiple,
    ).shards[data]


def measure(settings: Config, parallel: Any) -> dict[str, int]:
    from slimx.trainer.trainer import PolicyTrainer

    trainer = PolicyTrainer(settings, configured_model(settings), parallel)
    batches = micro_batches(settings, parallel.sizes, parallel.coordinates.data)
    trainer.train_step(batches, step=0, version=1)
    with LiveMemory() as live:
        trainer.train_step(batches, step=1, version=1)
    return {"live": live.peak, **trainer.offloading.sizes()}


def measure_all(job: dict[str, Any], rank: int) -> list[dict[str, int]]:
    cases = [config(job, case) for case in job["cases"]]
    parallel = join(cases[0].trainer, rank, job["init_method"])
    found = [measure(settings, parallel) for settings in cases]
    leave(parallel)
    return found


@pytest.mark.slow("full grid of layouts")
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_plan_says_what_trainers_with_images_hold(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, LAYOUTS[name].get("model", MODEL))
    layout = LAYOUTS[name]["layout"]
    sizes = sizes_of(config({**LAYOUTS[name], "model": model, "out": tmp_path, "rows": 1}, case("none")).trainer)
    job = {**LAYOUTS[name], "model": model, "out": tmp_path, "rows": ROWS * sizes.data}
    store = ImageStore(config(job, case("none")).images)
    patch = LAYOUTS[name].get("patch", (3 * 2 * 4 * 4,))
    pixels = np.random.default_rng(2).standard_normal((int(np.prod(GRID)), *patch), np.float32)
    for index in range(job["rows"]):
        store.save(f"{index:02x}", pixels, GRID)
    results = run_ranks(measure_all, tmp_path, layout["world_size"], job)
    off = []
    for number, one in enumerate(job["cases"]):
        settings = config(job, one)
        spec = configured_model(settings)
        records = {record.stage: record for record in trainer_memory(settings, spec, sizes, "cpu")}
        for rank, measured in enumerate(result[number] for result in results):
            runs = holdings(settings.trainer, settings.numerics, spec).runs(sizes, rank)
            state = Buffers(runs, settings.trainer, sizes).state(rank)
            found = measured["weights"], measured["gradients"], measured["optimizer state"]
            assert (state.weights, state.gradients, state.optimizer) == found, (one, rank)
            record = records[coordinates(rank, sizes).pipeline]
            off.append(record.peak / (sum(found) + measured["live"]) - 1)
            assert abs(off[-1]) <= WITHIN, (one, rank, record, measured)
    print(f"{name}: peaks off by {min(off):+.1%} to {max(off):+.1%}")
