"""Whole runs of vision-language models on prompts with images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from tests.integration.engine_families import make_model
from tests.integration.family_oracle import read
from tests.integration.runs import TrainProcess, steps, write_config

pytestmark = pytest.mark.integration


def picture(seed: int, wide: int, high: int) -> bytes:
    """Returns a PNG file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_prompts(directory: Path) -> Path:
    """Writes prompts with one image, with two of which one is a data URI, and without images."""
    (directory / "a.png").write_bytes(picture(1, 64, 64))
    uri = "data:image/png;base64," + base64.b64encode(picture(2, 96, 64)).decode()
    rows = []
    for index in range(8):
        images = [["a.png"], ["a.png", uri], []][index % 3]
        text = "<image>" * len(images) + f"{index}+1="
        row = {"messages": [{"role": "user", "content": text}], "answer": str(index + 1)}
        rows.append(row | ({"metadata": {"images": images}} if images else {}))
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_moe_published"])
def test_trainers_and_engines_agree_on_prompts_with_images(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    make_model(name, model)
    layout = {"tensor": 2, "expert": 2, "expert_tensor": 1} if "moe" in name else {"tensor": 2, "expert": 1}
    config = write_config(
        tmp_path,
        model,
        write_prompts(tmp_path),
        trainer={**layout, "vision": {"train": "tower"}},
        rollout={"group_size": 4, "sampling": {"max_new_tokens": 8}},
        schedule={"steps": 2},
        checkpoint={"export_hf": True},
    )
    run = TrainProcess(config)
    assert run.wait() == 0, run.text()
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2]
    for row in rows.values():
        assert row["gap/tokens"] > 0 and row["optim/grad_norm"] > 0 and row["publish/engines_verified"] == 1
        assert row["gap/max"] <= 1e-4
    shown = set()
    for file in step_files(tmp_path / "run" / DIRECTORY).values():
        for group in read_step(file)[1]:
            counts = {len(trajectory.images) for trajectory in group.trajectories}
            assert counts == {len(group.prompt.metadata.get("images", []))}
            shown |= counts
    assert shown >= {1, 2}
    before, exported = read(model), read(tmp_path / "run" / "hf")
    assert exported.keys() == before.keys()
    moved = {key for key, tensor in exported.items() if not tensor.equal(before[key])}
    assert any("visual.blocks.0" in key for key in moved) and any("visual.merger" in key for key in moved)
