"""A copy of a tokenizer has every file that decodes tokens, no weight, and is written only where it differs."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import sentencepiece

from slimx.data.chat.tokens import copy_tokenizer, load_tokenizer
from tests.unit.rollout.rollout_stand import the_tokenizer

TEXT = "what is 12 plus 30?"


def a_json(model: Path) -> None:
    the_tokenizer().save_pretrained(model)


def a_sentencepiece(model: Path) -> None:
    """Writes a Llama tokenizer without a tokenizer.json."""
    written = io.BytesIO()
    lines = (f"what is {first} plus {second}?" for first in range(40) for second in range(40))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=written, vocab_size=60, minloglevel=2
    )
    (model / "tokenizer.model").write_bytes(written.getvalue())
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "model.safetensors.index.json").write_text("{}")
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (model / name).write_text("{}")
    (model / "chat_template.json").write_text('{"chat_template": "x"}')
    return model


@pytest.mark.parametrize("write", [a_json, a_sentencepiece])
def test_a_copy_decodes_as_its_model_and_has_no_weights(write, model, tmp_path):
    write(model)
    ids = load_tokenizer(model)(TEXT).input_ids
    text = load_tokenizer(model).decode(ids)
    copy_tokenizer(model, tmp_path / "run" / "policy" / "solver" / "tokenizer")
    names = {path.name for path in model.iterdir()}
    shutil.rmtree(model)
    copy = tmp_path / "run" / "policy" / "solver" / "tokenizer"
    assert load_tokenizer(copy).decode(ids) == text and "12" in text
    assert names - {path.name for path in copy.iterdir()} == {"model.safetensors", "model.safetensors.index.json"}


def test_a_copy_of_tiktoken_has_its_vocabulary(model, tmp_path):
    (model / "tiktoken.model").write_bytes(b"YQ== 0\n")
    copy_tokenizer(model, tmp_path / "copy")
    assert (tmp_path / "copy" / "tiktoken.model").read_bytes() == b"YQ== 0\n"


def test_only_files_that_differ_are_written_again(model, tmp_path):
    a_json(model)
    copy = tmp_path / "copy"
    copy_tokenizer(model, copy)
    before = {path.name: os.stat(path).st_ino for path in copy.iterdir()}
    (model / "chat_template.json").write_text('{"chat_template": "y"}')
    (model / "processor_config.json").unlink()
    copy_tokenizer(model, copy)
    after = {path.name: os.stat(path).st_ino for path in copy.iterdir()}
    assert before.keys() - after.keys() == {"processor_config.json"}
    assert [name for name in after if before[name] != after[name]] == ["chat_template.json"]
    assert (copy / "chat_template.json").read_text() == '{"chat_template": "y"}'
