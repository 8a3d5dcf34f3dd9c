"""Rows of published data sets, in their published form, become prompts whose answers a reward can compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from slimx import cli
from slimx.data.prompts.read import read_prompts
from slimx.extras.datasets.command import KNOWN, check, convert
from slimx.extras.rewards.shared.boxes import last_box
from tests.extras.vision.picture_stand import picture, write_model
from tests.refusals import numbers, refused

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "500+500 = <<500+500=1000>>1000\n#### 1,000"},
    "math": {
        "problem": "Sum?",
        "level": "Level 5",
        "type": "Algebra",
        "solution": "\\boxed{1} so \\boxed{\\frac{1}{2}}.",
    },
    "dapo-math-17k": {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Solve it."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
    "aime24": {"id": 60, "problem": "Every morning", "solution": "...", "answer": "033", "url": "u", "year": "2024"},
    "aime25": {"problem_idx": 1, "problem": "Find", "answer": 70, "problem_type": ["Number Theory"]},
    "gpqa": {
        "Record ID": "rec06pnAkLOr2t2mp",
        "Question": "Which?",
        "Correct Answer": "right\n",
        "Incorrect Answer 1": "w1",
        "Incorrect Answer 2": "w2",
        "Incorrect Answer 3": "w3",
    },
    "ifeval": {
        "key": 1000,
        "prompt": "Write 300 words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [
            {"num_words": None, "relation": None},
            {"num_words": 300, "relation": "at least"},
        ],
    },
}


PICTURE = {"bytes": picture(200, 100), "path": "0.png"}
VLM_R1 = {
    "id": 1,
    "image": "0.png",
    "conversations": [
        {"from": "human", "value": "<image>Please give the box of the region this sentence describes: the red mug"},
        {"from": "gpt", "value": [20.0, 10.0, 120.0, 60.0]},
    ],
}
IMAGE_ROWS: dict[str, dict[str, Any]] = {
    "geometry3k": {"images": [PICTURE], "problem": "<image>Find $x$.", "answer": "2 \\sqrt { 221 }"},
    "clevr-count": {
        "image": PICTURE,
        "problem": "How many items are there in the image?",
        "solution": "<answer> 3 </answer>",
    },
    "refcoco": {
        "question_id": "0",
        "image": PICTURE,
        "question": "Describe the region.",
        "answer": ["the red mug", "mug"],
        "bbox": [20.0, 10.0, 100.0, 50.0],
    },
}


def converted(name: str, *rows: dict[str, Any], tmp_path: Path, seed: int = 0) -> list[dict[str, Any]]:
    source, out = tmp_path / "given.parquet", tmp_path / "out" / "made.jsonl"
    parquet.write_table(pa.Table.from_pylist(list(rows)), source)
    list(convert(name, out, str(source), seed))
    assert len(read_prompts(out)) <= len(rows)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "prompt_id", "answer", "metadata"),
    [
        ("gsm8k", "gsm8k:1", "1000", {}),
        ("math", "math:1", "\\frac{1}{2}", {"level": "Level 5", "type": "Algebra"}),
        ("dapo-math-17k", "9a9b6eb4", "34", {}),
        ("aime24", "60", "33", {}),
        ("aime25", "1", "70", {}),
        (
            "ifeval",
            "1000",
            None,
            {
                "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
                "kwargs": [{}, {"num_words": 300, "relation": "at least"}],
            },
        ),
    ],
)
def test_a_published_row_becomes_a_prompt(tmp_path, name, prompt_id, answer, metadata):
    (prompt,) = converted(name, ROWS[name], tmp_path=tmp_path)
    assert (prompt["id"], prompt.get("answer")) == (prompt_id, answer)
    assert prompt["metadata"] == {"dataset": name, **metadata}
    assert [turn["role"] for turn in prompt["messages"]] == ["user"] and prompt["messages"][0].keys() == {
        "role",
        "content",
    }


def test_every_known_data_set_is_tried():
    assert ROWS.keys() | IMAGE_ROWS.keys() == KNOWN.keys()


def test_choices_are_shuffled_by_seed_and_question_alone(tmp_path):
    rows = [{**ROWS["gpqa"], "Record ID": f"r{number}", "Question": f"Which {number}?"} for number in range(40)]
    made = converted("gpqa", *rows, tmp_path=tmp_path)
    for prompt in made:
        lines = prompt["messages"][0]["content"].splitlines()
        assert f"{prompt['answer']}) right" in lines
        assert sorted(line[3:] for line in lines if line[1:2] == ")") == ["right", "w1", "w2", "w3"]
    assert {prompt["answer"] for prompt in made} == {*"ABCD"}
    assert converted("gpqa", *rows[::-1], tmp_path=tmp_path) == made[::-1]
    assert converted("gpqa", *rows, tmp_path=tmp_path, seed=1) != made


def test_repeated_rows_are_written_once_and_counted(tmp_path):
    row = ROWS["dapo-math-17k"]
    assert len(converted("dapo-math-17k", row, row, row, tmp_path=tmp_path)) == 1
    other = row | {"reward_model": {"ground_truth": "35", "style": "rule"}}
    with refused("prompts.id", about="9a9b6eb4"):
        converted("dapo-math-17k", row, other, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("gsm8k", {"answer": "1000"}, "prompts.published"),
        ("math", {"solution": "none"}, "prompts.published"),
        ("aime24", {"answer": "1/2"}, "prompts.published"),
        ("gpqa", {"Correct Answer": None}, "prompts.published"),
        ("ifeval", {"kwargs": []}, "prompts.published"),
    ],
)
def test_a_row_that_is_not_of_the_data_set_is_refused(tmp_path, name, change, code):
    with refused(code, about=f"{tmp_path / 'given.parquet'}, row 1"):
        converted(name, ROWS[name] | change, tmp_path=tmp_path)


def test_another_data_sets_file_and_an_unknown_name_are_refused(tmp_path):
    with refused("prompts.field", about="answer"):
        converted("gsm8k", ROWS["ifeval"], tmp_path=tmp_path)
    with refused("data.name", about="gsm9k"):
        list(convert("gsm9k", tmp_path / "out.jsonl", None, 0))
    with refused("data.out", about=str(tmp_path)):
        list(convert("gsm8k", tmp_path, None, 0))


def test_the_last_box_is_found_with_its_braces_balanced():
    assert last_box("\\boxed{1} and \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_box("none") is None and last_box("\\boxed{torn") is None
    assert last_box("$\\boxed 2$") == "2" and last_box("\\fbox{3}") == "3"


def test_the_command_checks_a_file_and_names_what_it_needs(tmp_path, monkeypatch, capsys):
    path = tmp_path / "raw.jsonl"
    path.write_text(json.dumps(ROWS["gsm8k"]) + "\n" + json.dumps(ROWS["gsm8k"]) + "\n")
    lines = list(check(str(path), None, None, None, {}))
    assert any("answer_after" in line for line in lines) and f"{path}: 2 prompts" in lines
    assert [line for line in lines if line.startswith("--- ")] == [f"--- raw:{n} (answer: 1,000)" for n in (1, 2)]
    for arguments in (["nope", "x"], ["check", str(tmp_path / "absent")], ["check", str(path), "--fields", "[1"]):
        monkeypatch.setattr(sys, "argv", ["slimx", "data", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 2
        output = capsys.readouterr().err
        assert output.startswith("slimx: ") and len(output.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("geometry3k", "<image>Find $x$.", "2 \\sqrt { 221 }"),
        ("clevr-count", "<image>How many items are there in the image?", "3"),
        ("refcoco", "<image>Where is this in the image: the red mug", "[100, 100, 600, 600]"),
    ],
)
def test_a_published_row_with_an_image_becomes_a_prompt_and_a_file(tmp_path, name, text, answer):
    first, second = converted(name, IMAGE_ROWS[name], IMAGE_ROWS[name], tmp_path=tmp_path)
    assert (first["id"], second["id"]) == (f"{name}:1", f"{name}:2") and first["answer"] == answer
    assert first["messages"][0]["content"].partition("\n\n")[0] == text
    (image,) = first["metadata"]["images"]
    assert first["metadata"] == second["metadata"] == {"dataset": name, "images": [image]}
    (file,) = [file for file in (tmp_path / "out").rglob("*") if file.is_file() and file.suffix != ".jsonl"]
    assert file == tmp_path / "out" / image and file.read_bytes() == PICTURE["bytes"]


def test_a_row_of_vlm_r1_names_its_image_file(tmp_path):
    (tmp_path / "0.png").write_bytes(PICTURE["bytes"])
    other = VLM_R1 | {"conversations": [VLM_R1["conversations"][0], {"from": "gpt", "value": "[20, 10, 120, 60]"}]}
    rows = tmp_path / "refcoco_train.jsonl"
    rows.write_text(json.dumps(VLM_R1) + "\n" + json.dumps(other) + "\n")
    list(convert("refcoco", tmp_path / "out.jsonl", str(rows), 0))
    for prompt in read_prompts(tmp_path / "out.jsonl"):
        assert prompt.answer == "[100, 100, 600, 600]" and prompt.metadata["images"] == [str(tmp_path / "0.png")]
        assert "the red mug\n" in prompt.messages[0]["content"]


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("geometry3k", {"problem": "Find x."}, "prompts.published"),
        ("geometry3k", {"images": []}, "prompts.published"),
        ("geometry3k", {"images": PICTURE}, "prompts.published"),
        ("geometry3k", {"images": [{"bytes": b"text", "path": "a"}]}, "vision.image"),
        ("clevr-count", {"solution": "3"}, "prompts.published"),
        ("clevr-count", {"image": None}, "prompts.published"),
        ("refcoco", {"bbox": [20.0, 10.0, 100.0]}, "prompts.published"),
        ("refcoco", {"bbox": [150.0, 10.0, 100.0, 50.0]}, "prompts.published"),
        ("refcoco", {"answer": []}, "prompts.published"),
        ("refcoco", {"image": {"bytes": None, "path": "absent.png"}}, "vision.unreadable"),
    ],
)
def test_an_unfit_row_with_an_image_is_refused(tmp_path, name, change, code):
    with refused(code):
        converted(name, IMAGE_ROWS[name] | change, tmp_path=tmp_path)


def test_the_check_describes_images_for_a_model_that_shows_them(tmp_path):
    converted("clevr-count", *[IMAGE_ROWS["clevr-count"]] * 3, tmp_path=tmp_path)
    path = tmp_path / "given.parquet"
    model = write_model(tmp_path / "model")
    lines = list(check(str(path), str(model), None, None, {}))
    assert any("images: image" in line for line in lines)
    assert any(line.startswith("3 prompts with images") for line in lines)
    assert any("<|image_pad|>" in line for line in lines)
    assert "images: 3, different ones: 1" in lines
    assert any(numbers(line) == [200.0, 200.0, 90.0, 200.0, 200.0] for line in lines if line.startswith("width"))
    # 200 x 100 pixels become 11 x 5 tokens of 16 x 16 pixels, within 64.
    assert any(numbers(line) == [55.0, 55.0, 90.0, 55.0, 55.0] for line in lines if line.startswith("tokens per image"))
    (model / "config.json").write_text("{}")
    lines = list(check(str(path), str(model), None, None, {}))
    assert not any(line.startswith("width") for line in lines)
    assert any(line.startswith("3 prompts with images") for line in list(check(str(path), None, None, None, {})))
