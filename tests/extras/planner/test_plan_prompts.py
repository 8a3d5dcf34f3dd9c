"""`slimx plan` and `slimx data check` show how many tokens the images of a prompt become."""

from __future__ import annotations

import base64
import json

import pytest
from typer.testing import CliRunner

from slimx.cli import app
from slimx.extras.quickstart.make_vision_model import write_tokenizer
from tests.extras.vision.picture_stand import picture
from tests.integration.engine_families import MODELS
from tests.integration.vision_oracle import write_processor

SHOWN = "<|vision_start|><|image_pad|> x {}<|vision_end|>"


@pytest.fixture
def prompts(plan):
    """Writes prompts of two images, one of them in the file itself."""
    model = plan.directory / "model"
    model.mkdir()
    write_processor(MODELS["qwen3_vl"], model)
    write_tokenizer(model)
    (plan.directory / "a.png").write_bytes(picture(96, 64))
    uri = "data:image/png;base64," + base64.b64encode(picture(96, 96)).decode()
    row = {"messages": [{"role": "user", "content": "<image>1<image>2"}], "metadata": {"images": ["a.png", uri]}}
    (plan.directory / "p.jsonl").write_text(json.dumps(row))
    return plan.directory / "p.jsonl"


@pytest.mark.parametrize(("vision", "first", "second"), [("{}", 6, 9), ("{max_pixels: 4096}", 2, 4)])
def test_the_first_prompt_has_the_number_of_tokens_of_each_image(plan, prompts, vision, first, second):
    trainer = f"trainer={{world_size: 1, vision: {vision}}}"
    code, text = plan(MODELS["qwen3_vl"], f"rollout.prompts={prompts}", trainer)
    assert code == 0, text
    assert f"<user>{SHOWN.format(first)}1{SHOWN.format(second)}2<assistant>" in text
    assert not (plan.directory / "run").exists()


def test_an_image_that_is_missing_is_a_violation(plan, prompts):
    (plan.directory / "a.png").unlink()
    trainer = "trainer={world_size: 1, vision: {}}"
    code, text = plan(MODELS["qwen3_vl"], f"rollout.prompts={prompts}", trainer)
    assert code == 2
    assert any(line.startswith("slimx: ") and "a.png" in line and "p:1" in line for line in text.splitlines())


def test_checked_prompts_have_the_number_of_tokens_of_each_image(plan, prompts):
    model = plan.directory / "model"
    (model / "config.json").write_text(json.dumps(MODELS["qwen3_vl"]))
    result = CliRunner().invoke(app, ["data", "check", str(prompts), "--model", str(model)])
    assert result.exit_code == 0, result.output
    assert f"{SHOWN.format(6)}1{SHOWN.format(9)}2" in result.output
