"""Rows of every format become the same prompts; sources are mixed by weight, and go on where they were saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from slimx.config.sections.rollout import PromptSet, Rollout, RowFields
from slimx.data.prompts.mapping import RowMapping, fitting_fields, make_mapping
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Prompt
from slimx.orchestration.start.prompts import make_source, source_prompts
from tests.refusals import invalid, refused

ROWS = [{"question": "1+1=", "answer": 2}, {"question": "2+2=", "answer": 4}]
FIELDS = RowFields(prompt="question", answer="answer")


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def as_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    return path


def as_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows))
    return path


FORMATS = {".jsonl": as_jsonl, ".parquet": as_parquet, ".arrow": as_arrow, ".csv": as_csv, ".json": as_json}


def texts(prompts: list[Prompt]) -> list[tuple[str, str, str | None]]:
    return [(prompt.id, prompt.messages[-1]["content"], prompt.answer) for prompt in prompts]


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_prompts(tmp_path, suffix):
    path = FORMATS[suffix](tmp_path / f"sums{suffix}", ROWS)
    read = read_prompts(path, RowMapping(FIELDS))
    assert texts(read) == [("sums:1", "1+1=", "2"), ("sums:2", "2+2=", "4")]
    assert read[0].messages == [{"role": "user", "content": "1+1="}]


def test_a_directory_is_read_in_the_order_of_its_files(tmp_path):
    (tmp_path / "set" / "main").mkdir(parents=True)
    as_parquet(tmp_path / "set" / "main" / "train-00001-of-00002.parquet", ROWS[1:])
    as_parquet(tmp_path / "set" / "main" / "train-00000-of-00002.parquet", ROWS[:1])
    (tmp_path / "set" / "main" / "dataset_info.json").write_text("{}")
    assert texts(read_prompts(tmp_path / "set", RowMapping(FIELDS))) == [("set:1", "1+1=", "2"), ("set:2", "2+2=", "4")]
    as_parquet(tmp_path / "set" / "main" / "test-00000-of-00001.parquet", ROWS[1:])
    with refused("prompts.split", about=str(tmp_path / "set")):
        read_prompts(tmp_path / "set", RowMapping(FIELDS))
    assert texts(read_prompts(tmp_path / "set", RowMapping(FIELDS), split="test", subset="main")) == [
        ("set:1", "2+2=", "4")
    ]
    with refused("prompts.split", about=str(tmp_path / "set")):
        read_prompts(tmp_path / "set", RowMapping(FIELDS), split="dev")


def test_a_torn_file_is_named(tmp_path):
    path = as_parquet(tmp_path / "torn.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-8])
    with refused("prompts.unreadable", about=str(path)):
        read_prompts(path, RowMapping(FIELDS))
    path = tmp_path / "torn.csv"
    path.write_text("question,answer\n1+1=\n")
    with refused("prompts.line", about=f"{path}, row 1"):
        read_prompts(path, RowMapping(FIELDS))


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"question": "q", "answer": "so\n#### 4"}, {"prompt": "question", "answer": "answer", "answer_after": "####"}),
        (
            {"data_source": "math_dapo", "prompt": [], "reward_model": {"ground_truth": "34", "style": "rule"}},
            {"prompt": "prompt", "answer": "reward_model.ground_truth", "dataset": "data_source"},
        ),
        ({"ID": 1, "Problem": "p", "Answer": 33}, {"prompt": "Problem", "answer": "Answer"}),
        ({"text": "a"}, None),
    ],
)
def test_a_row_of_another_form_is_answered_with_the_fields_that_fit(tmp_path, row, fields):
    assert fitting_fields(row) == fields
    path = as_jsonl(tmp_path / "raw.jsonl", [row])
    with refused("prompts.key") as caught:
        read_prompts(path)
    assert ("rollout.fields" in str(caught.value)) == (fields is not None)


def test_fields_reach_nested_columns_and_keep_what_they_name(tmp_path):
    turns = [{"role": "user", "content": "1+1="}]
    row = {
        "prompt": turns,
        "reward_model": {"ground_truth": "2"},
        "extra": {"index": 7},
        "set": "sums",
        "tools": '[{"type": "function"}]',
        "picture": ["a.png"],
    }
    path = as_jsonl(tmp_path / "raw.jsonl", [row])
    fields = RowFields(
        prompt="prompt",
        answer="reward_model.ground_truth",
        id="extra.index",
        dataset="set",
        tools="tools",
        images="picture",
        metadata=("extra",),
    )
    assert read_prompts(path, RowMapping(fields)) == [
        Prompt(
            id="7",
            messages=turns,
            answer="2",
            tools=[{"type": "function"}],
            metadata={"extra": {"index": 7}, "dataset": "sums", "images": ["a.png"]},
        )
    ]
    assert read_prompts(path, RowMapping(fields))[0].source == "sums"
    with refused("prompts.field", about="solution"):
        read_prompts(path, RowMapping(RowFields(prompt="prompt", answer="solution")))
    with refused("prompts.answer_after", about=f"{path}, line 1"):
        read_prompts(path, RowMapping(RowFields(prompt="prompt", answer="set", answer_after="####")))


def test_a_system_turn_begins_every_prompt_but_those_that_have_one(tmp_path):
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    path = as_jsonl(tmp_path / "raw.jsonl", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": messages}])
    first, second = read_prompts(path, make_mapping(None, None, "be brief"))
    assert first.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert second.messages == messages
    with refused("prompts.system"):
        read_prompts(as_jsonl(tmp_path / "ids.jsonl", [{"token_ids": [1]}]), make_mapping(None, None, "be brief"))


def to_prompt(row: dict[str, Any]) -> Any:
    if row["question"] == "none":
        return None
    return {"messages": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}


def test_a_mapping_hook_makes_prompts_and_is_blamed_by_row(tmp_path):
    mapping = make_mapping(None, f"{__name__}.to_prompt", None)
    assert texts(read_prompts(as_jsonl(tmp_path / "a.jsonl", ROWS), mapping))[1] == ("a:2", "2+2=", "4")
    assert texts(read_prompts(as_jsonl(tmp_path / "a[1].jsonl", ROWS), mapping))[1][0] == "a:2"
    for row in ({"question": "none"}, {"q": 1}):
        path = as_jsonl(tmp_path / "b.jsonl", [row])
        with refused("prompts.map", about=f"{path}, line 1"):
            read_prompts(path, mapping)


def some(name: str, count: int) -> list[Prompt]:
    return [Prompt(id=f"{name}{index}", token_ids=[index]) for index in range(count)]


def take(source: Any, count: int) -> list[str]:
    return [source.next().id for _ in range(count)]


def test_sources_are_read_with_their_fields_and_unique_ids(tmp_path):
    raw = as_jsonl(tmp_path / "raw.jsonl", ROWS)
    other = as_jsonl(tmp_path / "own.jsonl", [{"messages": [{"role": "user", "content": "x"}], "id": "raw:1"}])
    sets = PromptSet(path=str(raw), name="sums", fields=FIELDS), PromptSet(path=str(other), name="own")
    with refused("prompts.id", about="raw:1"):
        source_prompts(Rollout(sources=sets))
    as_jsonl(other, [{"messages": [{"role": "user", "content": "x"}], "metadata": {"dataset": "given"}}])
    found = source_prompts(Rollout(sources=sets))
    assert [(prompt.id, prompt.source) for several in found.values() for prompt in several] == [
        ("raw:1", "sums"),
        ("raw:2", "sums"),
        ("own:1", "given"),
    ]


@pytest.mark.parametrize(
    ("keys", "code", "about"),
    [
        ({}, "config.missing_key", "rollout.prompts"),
        ({"prompts": "a", "sources": [{"path": "a", "name": "a"}]}, "sources.both", "rollout.prompts"),
        ({"sources": [{"path": "a", "name": "a"}, {"path": "b", "name": "a"}]}, "sources.name", "a"),
        ({"sources": [{"path": "a", "name": "a", "weight": 0}]}, "sources.weight", "rollout.sources"),
        ({"sources": [{"path": "a", "name": "a", "weight": {5: 1}}]}, "sources.weight", "rollout.sources"),
        ({"prompts": "a", "fields": {"prompt": "q"}, "map": "a.b"}, "prompts.map", "rollout.map"),
        ({"sources": [{"path": "a", "name": "a"}], "source": "a.b"}, "sources.source", "rollout.source"),
        ({"prompts": "a", "template": {"tools": []}}, "template.argument", "rollout.template.tools"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, code, about):
    with invalid(code, about=about):
        Rollout.model_validate(keys)


class Backwards:
    def __init__(self, prompts: list[Prompt], seed: int):
        self.prompts, self.taken = prompts[::-1], seed

    def next(self) -> Prompt:
        self.taken += 1
        return self.prompts[(self.taken - 1) % len(self.prompts)]

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def nothing(prompts: list[Prompt], seed: int) -> None:
    return None


def failing(prompts: list[Prompt], seed: int) -> None:
    raise ValueError("no")


def config_of(**rollout: Any) -> Any:
    from slimx.config.schema import Config

    keys = {"prompts": "a"} | rollout
    return Config.model_validate({"run": {"dir": "r", "seed": 0}, "model": {"path": "m"}, "rollout": keys})


def test_the_order_of_prompts_may_be_customized():
    prompts = {"": some("p", 3)}
    source = make_source(config_of(source=f"{__name__}.Backwards"), prompts)
    assert take(source, 4) == ["p2", "p1", "p0", "p2"]
    with refused("sources.methods", about="rollout.source"):
        make_source(config_of(source=f"{__name__}.nothing"), prompts)
    with refused("sources.raised", about="rollout.source"):
        make_source(config_of(source=f"{__name__}.failing"), prompts)
