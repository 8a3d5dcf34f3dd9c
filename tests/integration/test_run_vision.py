"""Whole runs of vision-language models on prompts with images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from slimx.data.records import Trajectory
from slimx.data.saved.step_files import DIRECTORY, read_step, step_files
from slimx.extras.quickstart.make_vision_model import TOKENS
from tests.integration.engine_families import make_model
from tests.integration.family_oracle import read
from tests.integration.runs import TrainProcess, completed_steps, steps, write_config, written
from tests.integration.victims import matching

pytestmark = pytest.mark.integration


STOPS = list(range(4, 128, 3))
"""An untrained model hardly ever ends a turn: one token in three does it here."""


def picture(seed: int, wide: int, high: int) -> bytes:
    """Returns a PNG file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_prompts(directory: Path, name: str = "a.png") -> Path:
    """Writes prompts with one image, with two of which one is a data URI, and without images. `name`: name of the file
    of the first image."""
    (directory / name).write_bytes(picture(1, 64, 64))
    uri = "data:image/png;base64," + base64.b64encode(picture(2, 96, 64)).decode()
    rows = []
    for index in range(8):
        images = [[name], [name, uri], []][index % 3]
        text = "<image>" * len(images) + f"{index}+1="
        row = {"messages": [{"role": "user", "content": text}], "answer": str(index + 1)}
        rows.append(row | ({"metadata": {"images": images}} if images else {}))
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_table(directory: Path) -> Path:
    """Writes a parquet file as the Hub has them: two images as bytes, and marks in the text."""
    rows = []
    for index in range(8):
        images = [{"bytes": picture(number, 64, 64), "path": f"{number}.png"} for number in range(index % 3)]
        rows.append({"problem": "<image>" * len(images) + f"{index}+1=", "images": images, "answer": str(index + 1)})
    parquet.write_table(pa.Table.from_pylist(rows), directory / "prompts.parquet")
    return directory / "prompts.parquet"


def write_run(directory: Path, name: str = "qwen3_vl", *, prompts: Path | None = None, **sections: Any) -> Path:
    """Makes the model `name`, and writes a run that trains its tower for two steps on prompts with images, with 4
    rollouts of 8 tokens for each. Merges `sections` in. `prompts`: file of prompts; None: that of `write_prompts`."""
    model = directory / "model"
    make_model(name, model)
    experts = {"expert": 2, "expert_tensor": 1} if "moe" in name or name == "kimi_k25" else {"expert": 1}
    defaults: dict[str, dict[str, Any]] = {
        "trainer": {"tensor": 2, **experts, "vision": {"train": "tower"}},
        "rollout": {"group_size": 4, "sampling": {"max_new_tokens": 8}},
        "schedule": {"steps": 2},
    }
    merged = {key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults.keys() | sections.keys()}
    return write_config(directory, model, prompts or write_prompts(directory), **merged)


def complete(config: Path, *overrides: str) -> TrainProcess:
    """Runs `config` to its end."""
    run = TrainProcess(config, *overrides)
    assert run.wait() == 0, run.text()
    return run


@pytest.mark.slow("three whole runs")
def test_images_of_a_table_are_kept_out_of_saved_steps_and_replayed(tmp_path: Path) -> None:
    fields = {"prompt": "problem", "answer": "answer", "images": "images"}
    prompts = write_table(tmp_path)
    sections = {"trainer": {"vision": {}}, "rollout": {"fields": fields}, "checkpoint": {"every": 1}}
    config = write_run(tmp_path, prompts=prompts, **sections)
    complete(config, "schedule.steps=1")
    resumed = complete(config)
    assert "resumed" in resumed.text() and list(steps(tmp_path / "run")) == [1, 2]
    ends = [picture(number, 64, 64)[-300:-50] for number in range(2)]
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and "originals" not in file.parts]
    assert len(step_files(tmp_path / "run" / DIRECTORY)) == 2
    for file in files:
        data = file.read_bytes()
        assert not any(end in data for end in ends), file
    originals = [file for file in (tmp_path / "run/images/originals").rglob("*") if file.is_file()]
    assert sorted(file.read_bytes() for file in originals) == sorted(picture(number, 64, 64) for number in range(2))
    prompts.unlink()
    complete(config, f"run.dir={tmp_path / 'again'}", f"rollout.replay={tmp_path / 'run'}")
    before, after = steps(tmp_path / "run"), steps(tmp_path / "again")
    assert list(after) == [1, 2]
    assert after[1]["optim/grad_norm"] == pytest.approx(before[1]["optim/grad_norm"], rel=1e-5)


@pytest.mark.slow("a whole run")
def test_engines_that_evaluate_during_training_see_images(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    evaluations = {"prompts": str(prompts), "every": 1, "engines": [{"max_total_tokens": 8192}]}
    complete(write_run(tmp_path, prompts=prompts, eval=evaluations, track={"samples": 8}))
    evaluated = [row["step"] for row in written(tmp_path / "run/metrics.jsonl") if "eval/accuracy" in row["metrics"]]
    assert evaluated == [0, 1, 2]
    samples = [sample for sample in written(tmp_path / "run/samples.jsonl") if sample["evaluation"]]
    assert {len(sample["images"] or []) for sample in samples} == {0, 1, 2}


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl",
        *(
            pytest.param(name, marks=pytest.mark.slow("full grid of families"))
            for name in ("qwen3_5_moe_published", "qwen3_vl_moe", "qwen2_5_vl", "glm4v_moe", "kimi_k25")
        ),
    ],
)
def test_trainers_and_engines_agree_on_prompts_with_images(tmp_path: Path, name: str) -> None:
    complete(write_run(tmp_path, name, checkpoint={"export_hf": True}))
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
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").open()]
    assert {len(sample["images"] or []) for sample in samples} == {0, 1, 2}
    before, exported = read(tmp_path / "model"), read(tmp_path / "run" / "hf")
    assert exported.keys() == before.keys()
    moved = {key for key, tensor in exported.items() if not tensor.equal(before[key])}
    block, projector = ("tower.encoder.blocks.0", "mm_projector") if name == "kimi_k25" else ("l.blocks.0", "l.merger")
    assert any(block in key for key in moved) and any(projector in key for key in moved)


@pytest.mark.slow("a whole run that loses its engine")
def test_an_engine_that_is_lost_with_images_is_replaced(tmp_path: Path) -> None:
    health = {"interval": 0.5, "timeout": 30, "restarts": 1}
    rollout = {"sampling": {"max_new_tokens": 60}, "health": health}
    config = write_run(tmp_path, trainer={"tensor": 1}, rollout=rollout, schedule={"steps": 6})
    directory, run = tmp_path / "run", TrainProcess(config)
    run.until(lambda: completed_steps(directory) >= 2)
    (scheduler,) = matching("sglang::scheduler")(run)
    scheduler.kill()
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    rows = steps(directory)
    assert list(rows) == [1, 2, 3, 4, 5, 6] and max(row["engines/lost"] for row in rows.values()) == 1
    for row in rows.values():
        assert row["dropped/total"] == 0 and row["gap/tokens"] > 0 and row["gap/max"] <= 1e-4


@pytest.mark.slow("three whole runs")
def test_a_run_with_images_is_resumed_and_replayed(tmp_path: Path) -> None:
    config = write_run(tmp_path, trainer={"tensor": 1}, schedule={"steps": 3})
    complete(config, "schedule.steps=2")
    complete(config)
    rows = steps(tmp_path / "run")
    assert list(rows) == [1, 2, 3] and rows[3]["gap/max"] <= 1e-4
    complete(config, f"run.dir={tmp_path / 'again'}", f"rollout.replay={tmp_path / 'run'}", "rollout.engines=[]")
    replayed = steps(tmp_path / "again")
    assert [row["optim/grad_norm"] for row in replayed.values()] == [row["optim/grad_norm"] for row in rows.values()]


@pytest.mark.slow("a whole run of each case")
@pytest.mark.parametrize(
    ("name", "encoding"), [("qwen3_vl", "auto"), ("qwen3_vl_moe", "hf"), ("qwen3_5_moe_published", "auto")]
)
def test_adapters_of_the_language_model_learn_from_images(tmp_path: Path, name: str, encoding: str) -> None:
    experts = "moe" in name
    trainer = {"tensor": 2 if experts else 1, "vision": {}, "lora": {"rank": 2, "alpha": 4}}
    sections = {"publish": {"encoding": encoding}, "checkpoint": {"export_hf": True}}
    complete(write_run(tmp_path, name, trainer=trainer, **sections))
    for row in steps(tmp_path / "run").values():
        assert row["gap/tokens"] > 0 and row["gap/max"] <= 1e-4 and row["optim/grad_norm"] > 0
    before, exported = read(tmp_path / "model"), read(tmp_path / "run" / "hf")
    moved = {key for key, tensor in exported.items() if not tensor.equal(before[key])}
    for adapted in ("self_attn.q_proj", "mlp.experts.down_proj" if experts else "mlp.down_proj"):
        assert any(adapted in key for key in moved), adapted
    assert not any("visual" in key for key in moved)


@pytest.mark.slow("a whole run of two minutes; the next test keeps the same requests without trainers")
def test_later_turns_and_agents_with_images_are_trained(tmp_path: Path) -> None:
    heldout = tmp_path / "heldout"
    heldout.mkdir()
    sampling = {"max_new_tokens": 8, "stop_token_ids": STOPS}
    rollout = {"generate": "tests.integration.pictures.mixed", "sampling": sampling}
    evaluation = {"prompts": str(write_prompts(heldout, "b.png")), "every": 2}
    complete(write_run(tmp_path, rollout=rollout, eval=evaluation))
    rows = steps(tmp_path / "run")
    assert list(rows) == [0, 1, 2] and "eval/accuracy" in rows[0] and "eval/accuracy" in rows[2]
    for row in (rows[1], rows[2]):
        assert row["gap/tokens"] > 0 and row["optim/grad_norm"] > 0 and row["gap/max"] <= 1e-4
    stray = set()
    images: dict[str, set[int]] = {"agent": set(), "environment": set()}
    for file in step_files(tmp_path / "run" / DIRECTORY).values():
        for group in read_step(file)[1]:
            for trajectory in group.trajectories:
                kind = "agent" if trajectory.index % 2 else "environment"
                images[kind].add(
                    len(trajectory.images) - len(group.prompt.metadata.get("images", [])) * (kind != "agent")
                )
                stray |= set(outside(trajectory))
    assert 3 in images["agent"] and {2, 4} & images["environment"]
    assert "inserted" in stray


def outside(trajectory: Trajectory) -> Iterator[str]:
    """Yields the source of each placeholder token that belongs to no image."""
    for index in np.flatnonzero(trajectory.token_ids == TOKENS["image_token_id"]).tolist():
        if not any(image.start <= index < image.stop for image in trajectory.images):
            yield next(span.source for span in trajectory.spans if span.start <= index < span.stop)
