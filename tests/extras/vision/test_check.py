"""Prompts with images are checked before a run starts, with the number of tokens that the processor will give."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from slimx.config.load import load_config
from slimx.data.chat.tokens import load_tokenizer
from slimx.data.prompts.read import RowMapping, read_prompts
from slimx.data.records import Prompt
from slimx.extras.vision.images.processing import load_processor, patches
from slimx.extras.vision.prompts.check import ModelImages
from slimx.extras.vision.prompts.rows import RowImages
from slimx.orchestration.start.prompts import heldout_prompts, row_images, source_prompts
from tests.extras.vision.picture_stand import MERGE, TOKEN, picture, write_model
from tests.refusals import refused

SIDES = st.integers(1, 700)
VOCABULARY = 104


@cache
def processor(directory: Path, kind: str):
    return load_processor(str(write_model(directory, kind)), {"longest_edge": 40 * 16**2})


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Glm4vImageProcessor"])
@settings(max_examples=60, deadline=None)
@given(wide=SIDES, high=SIDES)
def test_the_number_of_tokens_is_that_of_the_processor(tmp_path_factory, kind, wide, high):
    directory = tmp_path_factory.getbasetemp() / kind
    made = processor(directory, kind)
    rows = RowImages(None)
    rows.sizes["x"] = (wide, high)
    images = ModelImages(str(directory), rows, {"longest_edge": 40 * 16**2})
    try:
        pixels, grid = patches(made, Image.fromarray(np.zeros((high, wide, 3), np.uint8)))
    except ValueError:
        with pytest.raises(ValueError, match="ratio"):
            images.tokens_of("x")
        return
    assert len(pixels) == np.prod(grid)
    assert images.tokens_of("x") == np.prod(grid) // MERGE**2


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def check(tmp_path, model):
    """Returns a function that reads and checks one prompt with the text, the images and the limit given to it."""

    def checked(text: str, images: list[str], limit: int = 100, **more: object) -> None:
        row = {"messages": [{"role": "user", "content": text}], "metadata": {"images": images}} | more
        (tmp_path / "rows.jsonl").write_text(
            json.dumps({key: value for key, value in row.items() if value is not None})
        )
        rows = RowImages(None)
        prompts = read_prompts(tmp_path / "rows.jsonl", RowMapping(images=rows))
        ModelImages(str(model), rows).check(load_tokenizer(model), prompts, "rows.jsonl", limit, VOCABULARY)

    (tmp_path / "a.png").write_bytes(picture(64, 64))  # 16 tokens
    (tmp_path / "line.png").write_bytes(picture(400, 1))
    (tmp_path / "torn.png").write_bytes(picture()[:20])
    return checked


def test_the_tokens_of_images_count_towards_the_limit(check, model, tmp_path):
    tokenizer = load_tokenizer(model)
    text = len(tokenizer.apply_chat_template([{"role": "user", "content": "12"}], add_generation_prompt=True).input_ids)
    for images in (["a.png"], ["a.png", "a.png"]):
        tokens = text + 18 * len(images)
        for content in ("12", "<image>" * len(images) + "12"):
            check(content, images, tokens)
            with refused("prompts.length", about="rows:1"):
                check(content, images, tokens - 1)
    check("12", [], text)


@pytest.mark.parametrize(
    ("text", "images", "more", "code"),
    [
        ("<image>", [], {}, None),
        ("<image><image>", ["a.png"], {}, "vision.marks"),
        ("<image>", ["a.png", "a.png"], {}, "vision.marks"),
        ("1", ["absent.png"], {}, "vision.unreadable"),
        ("1", ["model"], {}, "vision.unreadable"),
        ("1", ["torn.png"], {}, "vision.image"),
        ("1", ["line.png"], {}, "vision.shape"),
        ("<|image_pad|>1", ["a.png"], {}, "vision.placeholder"),
        ("<|image_pad|>1", [], {}, "vision.placeholder"),
        ("", ["a.png"], {"messages": None, "token_ids": [5]}, "vision.token_ids"),
        ("", [], {"messages": None, "token_ids": [5, TOKEN]}, "vision.placeholder"),
        ("1", ["a.png"], {"messages": [{"role": "system", "content": "1"}]}, "vision.marks"),
    ],
)
def test_an_unfit_prompt_is_refused_by_its_id(check, text, images, more, code):
    if code is None:
        check(text, images, **more)
        return
    with refused(code) as caught:
        check(text, images, **more)
    assert "rows:1" in str(caught.value) and "rows.jsonl" in str(caught.value)


def run_file(tmp_path: Path, model: Path, prompts: Path, **trainer: object) -> Path:
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "rollout": {"prompts": str(prompts), "max_prompt_tokens": 60},
        "reward": {"function": "exact"},
        "trainer": {"world_size": 1, **trainer},
        "schedule": {"steps": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "run.yaml"


def test_a_run_reads_its_limits_and_keeps_images_only_when_it_starts(tmp_path, model):
    uri = "data:image/png;base64," + base64.b64encode(picture(64, 64)).decode()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "url": uri}]}]}))
    config = load_config(run_file(tmp_path, model, rows, vision={"max_pixels": 4 * 16**2}), [f"eval.prompts={rows}"])
    spec = type("Spec", (), {"vocab_size": VOCABULARY})()
    tokenizer = load_tokenizer(model)
    first = source_prompts(config.rollout, row_images(config, False))[""]
    assert not (tmp_path / "run").exists()
    images = row_images(config, True)
    assert source_prompts(config.rollout, images)[""] == first and (tmp_path / "run/images/originals").is_dir()
    images.check(tokenizer, first, "rows.jsonl", 10, VOCABULARY)  # 4 tokens of the image, 6 others
    with refused("prompts.length"):
        images.check(tokenizer, first, "rows.jsonl", 6, VOCABULARY)
    assert heldout_prompts(config, "", str(rows), tokenizer, spec) == first
    text = load_config(run_file(tmp_path, model, rows))
    assert row_images(text, True) is None
    with refused("prompts.content"):
        source_prompts(text.rollout, None)


def test_the_text_around_images_must_be_rendered(tmp_path, model):
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ part.text }}", "")
    (tmp_path / "a.png").write_bytes(picture())
    messages = [{"role": "user", "content": "<image>1"}, {"role": "user", "content": "2"}]
    prompt = Prompt(id="p", messages=messages, metadata={"images": [str(tmp_path / "a.png")]})
    ModelImages(str(model), RowImages(None)).check(tokenizer, [prompt], "f", 60, VOCABULARY)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ message.content }}", "")
    with refused("prompts.template", about="p"):
        ModelImages(str(model), RowImages(None)).check(tokenizer, [prompt], "f", 60, VOCABULARY)
