"""`slimx doctor FILE --hooks` tries hooks on prompts with images as a run does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from slimx.config.load import load_config
from slimx.data.records import Prompt, Trajectory
from slimx.extras.doctor.hooks.doctor import HookFindings, examine_hooks
from slimx.extras.quickstart.make_vision_model import write_tokenizer
from slimx.rollout.hooks import RolloutContext
from tests.extras.vision.picture_stand import picture
from tests.extras.vision.vision_stand import write
from tests.integration.engine_families import MODELS
from tests.integration.vision_oracle import write_processor

PICTURES = "tests.integration.pictures"


async def shows(ctx: RolloutContext, prompt: Prompt, image: bytes = b"") -> Trajectory:
    """Shows an image of 9 tokens, or `image`, after the model's first turn."""
    draft = ctx.draft(prompt)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, images=draft.images))
    parts = [{"type": "image", "image": image or picture(96, 96)}]
    token_ids, images = await ctx.turn_with_images(parts, after=draft.token_ids)
    draft.add_inserted(token_ids, images=images)
    draft.add_sampled(await ctx.engine.generate(draft.token_ids, turn=1, images=draft.images))
    trajectory = draft.finish()
    assert [image.stop - image.start for image in trajectory.images] == [6, 9]
    return trajectory


async def shows_torn(ctx: RolloutContext, prompt: Prompt) -> Trajectory:
    return await shows(ctx, prompt, picture(96, 96)[:200])


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Writes a run of a tiny Qwen3-VL whose second prompt has an image of 6 tokens."""
    hf = MODELS["qwen3_vl"]
    model = tmp_path / "model"
    model.mkdir()
    write(model, hf)
    write_processor(hf, model)
    write_tokenizer(model)
    (tmp_path / "a.png").write_bytes(picture(96, 64))
    shown = {"messages": [{"role": "user", "content": "<image>1+1="}], "metadata": {"images": ["a.png"]}}
    rows = [{"messages": [{"role": "user", "content": "1+1="}]}, {**shown, "answer": "2", "id": "shown"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "trainer": {"vision": {"processes": 1}},
        "rollout": {"prompts": str(tmp_path / "prompts.jsonl"), "max_prompt_tokens": 64, "group_size": 8},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "run.yaml"


def examine(run_file: Path, generate: str, *overrides: str) -> HookFindings:
    return examine_hooks(load_config(run_file, [f"rollout.generate={generate}", *overrides]))


def spans(found: HookFindings) -> list[list[str]]:
    """Returns the spans of each trajectory in the table."""
    return [re.findall(r"\b[psi]\d+", line) for line in found.lines if re.search(r"\d/0 ", line)]


def test_hooks_that_show_images_are_tried_on_a_prompt_with_images(run_file):
    found = examine(run_file, f"{__name__}.shows")
    assert not found.problems, found.problems
    assert any(line.startswith("prompt 'shown'") for line in found.lines)
    rows = spans(found)
    # Role, start, 6 placeholders, end, "1+1=", role; then "2" and its end, role, start, 9 placeholders, end, role.
    assert rows[0] == ["p14", "s2", "i13", "s2"] and len(rows) == 3
    assert not (run_file.parent / "run").exists()


@pytest.mark.slow("a rehearsal like that of hooks")
@pytest.mark.parametrize(
    "overrides",
    [
        ("multi_turn", f"rollout.options.environment={PICTURES}.Painted", "rollout.options.max_turns=3"),
        ("agent", f"rollout.options.agent={PICTURES}.solve"),
    ],
    ids=["environment", "agent"],
)
def test_environments_and_agents_with_images_are_tried(run_file, overrides):
    found = examine(run_file, *overrides)
    assert not found.problems, found.problems
    assert len(spans(found)) == 3


def test_a_prompts_image_that_cannot_be_decoded_is_named(run_file):
    file = run_file.parent / "a.png"
    file.write_bytes(file.read_bytes()[:200])
    (problem,) = examine(run_file, "single_turn").problems
    assert (problem.code, problem.about) == ("vision.image", "shown")
    assert "image 0" in str(problem)


@pytest.mark.slow("a rehearsal like that of a prompt's image")
def test_a_hooks_image_that_cannot_be_decoded_is_named(run_file):
    (problem,) = examine(run_file, f"{__name__}.shows_torn").problems
    assert (problem.code, problem.about) == ("hooks.failed", "generate failed")
    assert "image 0" in str(problem)
