"""Rows as other programs write them: marks and cells of spreadsheets, nulls of columnar files, turns of chat sets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from slimx.config.sections.rollout import RowFields
from slimx.data.prompts.mapping import RowMapping, fitting_fields, make_mapping
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Prompt
from slimx.extras.datasets.known import AIME24
from tests.refusals import refused

TURN = {"role": "user", "content": "1+1="}
SUMS = RowMapping(RowFields(prompt="question", answer="answer"))
SHAREGPT = RowMapping(RowFields(prompt="conversations"))


def as_table(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    table = pa.Table.from_pylist(rows, schema)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return path
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def as_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(prompts: list[Prompt]) -> list[str | None]:
    return [prompt.answer for prompt in prompts]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_nulls_that_pad_a_table_are_absent_keys(tmp_path, ending):
    weather = tool("weather", city={"type": "string", "enum": ["Paris", None]})
    total = tool("total", x={"type": "number", "default": None}, y={"type": "number", "minimum": 0})
    call = {"type": "function", "function": {"name": "total", "arguments": "{}"}}
    messages = [TURN, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    rows = [
        {"messages": [TURN], "tools": [weather, total], "template": {"enable_thinking": False}, "id": None},
        {"messages": messages, "tools": None, "template": {"mode": "fast"}, "id": "own"},
    ]
    first, second = read_prompts(as_table(tmp_path / f"rows{ending}", rows))
    assert first.messages == [TURN] and second.messages == messages
    assert first.tools == [weather, total] and second.tools is None
    assert (first.template, second.template) == ({"enable_thinking": False}, {"mode": "fast"})
    assert (first.id, second.id) == ("rows:1", "own")


def test_a_default_that_some_rows_have_is_no_default_of_others(tmp_path):
    tools = [tool("a", x={"type": "string", "default": "o"}), tool("b", x={"type": "string"})]
    assert read_prompts(as_table(tmp_path / "t.parquet", [{"messages": [TURN], "tools": tools}]))[0].tools == tools


def test_nulls_in_json_are_kept(tmp_path):
    tools = [tool("a", x={"type": "string", "default": None})]
    assert read_prompts(as_lines(tmp_path / "t.jsonl", {"messages": [TURN], "tools": tools}))[0].tools == tools


def test_a_struct_that_is_a_column_keeps_its_null(tmp_path):
    rows = [{"question": "q", "gold": {"answer": "2"}}, {"question": "q", "gold": {"answer": None}}]
    path = as_table(tmp_path / "t.parquet", rows)
    assert answers(read_prompts(path, RowMapping(RowFields(prompt="question", answer="gold.answer")))) == ["2", None]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.float16()])
def test_nan_is_a_missing_value_and_integers_stay_integers(tmp_path, kind):
    import numpy as np

    values = np.array([5, np.nan, 2.5], kind.to_pandas_dtype())
    table = pa.table({"question": ["a", "b", "c"], "answer": pa.array(values), "set": pa.array(values)})
    parquet.write_table(table, tmp_path / "t.parquet")
    fields = RowFields(prompt="question", answer="answer", id="answer", dataset="set")
    read = read_prompts(tmp_path / "t.parquet", RowMapping(fields), dataset="sums")
    assert answers(read) == ["5", None, "2.5"]
    assert [prompt.id for prompt in read] == ["5", "t:2", "2.5"]
    assert read[1].source == "sums"


def missing(row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [TURN], "answer": float("nan")}


def test_a_hooks_nan_is_no_answer_and_large_numbers_stay_as_they_are(tmp_path):
    path = as_lines(tmp_path / "t.jsonl", {"question": "q", "answer": 5.0}, {"question": "q", "answer": 1e300})
    assert answers(read_prompts(path, make_mapping(None, f"{__name__}.missing", None))) == [None, None]
    assert answers(read_prompts(path, SUMS)) == ["5", "1e+300"]


def test_rows_without_an_id_are_numbered(tmp_path):
    path = as_lines(tmp_path / "t.jsonl", {"question": "q", "id": None}, {"question": "q", "id": 0})
    read = read_prompts(path, RowMapping(RowFields(prompt="question", id="id")))
    assert [prompt.id for prompt in read] == ["t:1", "0"]
    row = {"ID": None, "Problem": "p", "Answer": 33.0}
    assert AIME24.convert(row, "row 1", 0).items() >= {("answer", "33")}
    assert "id" not in AIME24.convert(row, "row 1", 0)


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (".csv", "question,answer\r\n1+1=,2\r\n"),
        (".CSV", 'question,answer\n"1+1=","2"'),
        (".tsv", "question\tanswer\n1+1=\t2\n"),
        (".jsonl", '{"question": "1+1=", "answer": 2}\n\ufeff{"question": "1+1=", "answer": 2}\n'),
        (".ndjson", '{"question": "1+1=", "answer": 2}\n'),
        ("", '{"question": "1+1=", "answer": 2}\n'),
        (".json", '[{"question": "1+1=", "answer": 2}]'),
        (".json", '\n     [{"question": "1+1=", "answer": 2}]'),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, ending, text, mark):
    path = tmp_path / f"sums{ending}"
    path.write_bytes(f"{mark}{text}".encode())
    read = read_prompts(path, SUMS)
    assert {(prompt.messages[0]["content"], prompt.answer) for prompt in read} == {("1+1=", "2")}


@pytest.mark.parametrize(("ending", "content"), [(".xlsx", b"PK\x03\x04"), (".txt", b"1+1="), (".jsonl.gz", b"\x1f")])
def test_an_ending_that_is_not_read_is_refused_by_name(tmp_path, ending, content):
    path = tmp_path / f"sums{ending}"
    path.write_bytes(content)
    with refused("prompts.ending", about=str(path)) as caught:
        read_prompts(path, SUMS)
    assert all(known in str(caught.value) for known in (".jsonl", ".csv", ".tsv", ".parquet"))
    with refused("prompts.unreadable", about=str(tmp_path)):
        read_prompts(tmp_path, SUMS)


def test_a_cell_may_be_a_long_document_and_an_empty_one_is_null(tmp_path):
    path, text = tmp_path / "t.csv", "x" * 2**20
    path.write_text(f"question,answer\n{text},\nq,2\n")
    first, second = read_prompts(path, SUMS)
    assert first.messages[0]["content"] == text and first.answer is None and second.answer == "2"
    path.write_text("question,answer\n,2\n")
    with refused("prompts.neither", about=f"{path}, row 1"):
        read_prompts(path, SUMS)


def test_a_column_that_a_header_names_twice_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("question,answer,answer\nq,1,2\n")
    with refused("prompts.unreadable", about=str(path)):
        read_prompts(path, SUMS)


def test_sharegpt_turns_are_read_and_the_last_one_is_the_answer(tmp_path):
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    row = {"id": "x", "conversations": turns}
    path = as_lines(tmp_path / "chat.jsonl", row)
    assert fitting_fields(row) == {"prompt": "conversations"}
    with refused("prompts.key", about="conversations") as caught:
        read_prompts(path)
    assert "{prompt: conversations}" in str(caught.value)
    (read,) = read_prompts(path, SHAREGPT)
    assert read.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert read.answer == "b"
    as_lines(path, {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{}"}]})
    with refused("prompts.message", about=f"{path}, line 1"):
        read_prompts(path, SHAREGPT)


def test_messages_that_end_with_the_assistants_turn_hold_the_answer(tmp_path):
    reply = {"role": "assistant", "content": "2"}
    path = as_lines(tmp_path / "chat.jsonl", {"messages": [TURN, reply, TURN, reply | {"name": None}]})
    (read,) = read_prompts(path)
    assert read.messages == [TURN, reply, TURN] and read.answer == "2"
    assert read_prompts(path, make_mapping(None, None, "brief"))[0].messages[0]["role"] == "system"
    for wrong in (
        {"messages": [TURN, reply], "answer": "2"},
        {"messages": [TURN, reply | {"tool_calls": [{"type": "function"}]}]},
        {"messages": [TURN, reply | {"reasoning_content": "1 and 1"}]},
        {"messages": [TURN, reply | {"content": None}]},
    ):
        as_lines(path, wrong)
        with refused("prompts.last_turn", about=f"{path}, line 1"):
            read_prompts(path)


@pytest.mark.parametrize("length", [9, 10, 11])
def test_a_failed_download_is_explained_in_full(monkeypatch, length):
    import huggingface_hub

    def download(*_: Any, **__: Any) -> None:
        raise OSError(" ".join(["z" * length] * 200))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with refused("prompts.download", about="hf://owner/name") as caught:
        read_prompts("hf://owner/name")
    assert {len(word) for word in re.findall("z+", str(caught.value))} == {length}
