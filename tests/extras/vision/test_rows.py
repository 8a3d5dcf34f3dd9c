"""Rows of data sets with images become prompts with short references, which contain no image."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from slimx.config.sections.rollout import RowFields
from slimx.data.prompts.mapping import RowMapping, make_mapping
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Group
from slimx.data.saved.codec import load_groups, save_groups
from slimx.digest import fingerprint
from slimx.extras.vision.images.sources import read_image
from slimx.extras.vision.images.store import ImageStore
from slimx.extras.vision.prompts.rows import RowImages
from tests.extras.vision.picture_stand import picture
from tests.refusals import refused

A, B = picture(48, 32, seed=1), picture(16, 64, "JPEG", seed=2)
STORED_A, STORED_B = f"stored:{fingerprint(A)}", f"stored:{fingerprint(B)}"


def read(path, store=None, images="images", rows=None):
    fields = RowFields(prompt="prompt", images=images)
    return read_prompts(path, RowMapping(fields, images=rows or RowImages(store)))


def table(path: Path, *rows: dict) -> Path:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"bytes": A, "path": "a.png"}, {"bytes": B, "path": None}], [STORED_A, STORED_B]),
        ({"bytes": A, "path": "a.png"}, [STORED_A]),
        ([A, B], [STORED_A, STORED_B]),
        (A, [STORED_A]),
        ("sub/a.png", ["{}/sub/a.png"]),
        (["sub/a.png", "/b.png"], ["{}/sub/a.png", "/b.png"]),
        ({"bytes": None, "path": "a.png"}, ["{}/a.png"]),
        ([], []),
    ],
)
def test_every_form_of_an_image_column_becomes_a_list(tmp_path, value, expected):
    (prompt,) = read(table(tmp_path / "rows.parquet", {"prompt": "x", "images": value}))
    assert prompt.metadata["images"] == [entry.format(tmp_path) for entry in expected]
    assert prompt.messages == [{"role": "user", "content": "x"}]


def test_rows_without_an_image_are_prompts_of_text(tmp_path):
    first, second = read(
        table(tmp_path / "rows.parquet", {"prompt": "x", "images": A}, {"prompt": "y", "images": None})
    )
    assert first.metadata["images"] == [STORED_A] and not second.metadata.get("images")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    assert read_prompts(path, RowMapping(images=RowImages(None)))[0].metadata == {}


def test_without_the_section_a_column_reaches_hooks_unchanged(tmp_path):
    (prompt,) = read_prompts(
        table(tmp_path / "rows.parquet", {"prompt": "x", "images": A}),
        RowMapping(RowFields(prompt="prompt", images="images")),
    )
    assert prompt.metadata["images"] == A


def test_parts_of_messages_become_marks_before_turns_are_checked(tmp_path):
    uri = "data:image/png;base64," + base64.b64encode(A).decode()
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "x"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "y"}]}
    row = {"messages": [{"role": "user", "content": parts}, answer]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"messages": row["messages"][:1]}) + "\n")
    first, second = read_prompts(path, make_mapping(None, None, "be brief", RowImages(None)))
    assert first.messages == second.messages
    assert first.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "<image>x"}]
    assert (first.answer, second.answer) == ("y", None)
    assert first.metadata == {"images": [STORED_A]}
    path.write_text(json.dumps(row | {"messages": row["messages"][:1]}))
    with refused("prompts.content"):
        read_prompts(path, make_mapping(None, None, None))


def test_an_error_names_the_row_and_the_image(tmp_path):
    path = table(tmp_path / "rows.parquet", {"prompt": "x", "images": [A]}, {"prompt": "y", "images": [A, A[:30]]})
    with refused("vision.image", about=f"{path}, row 2: image 1"):
        read(path)
    with refused("vision.url", about=f"{path}, row 1: image 0"):
        read(table(path, {"prompt": "x", "images": "https://example.com/a.png"}))


def test_a_saved_prompt_contains_no_image_and_its_images_are_found_again(tmp_path):
    path = table(
        tmp_path / "rows.parquet", {"prompt": "x", "images": [{"bytes": A, "path": "a"}, {"bytes": B, "path": "b"}]}
    )
    store = ImageStore(tmp_path / "run" / "images")
    (prompt,) = read(path, store)
    file = tmp_path / "step-0000001.groups"
    save_groups(file, [Group(id="g", prompt=prompt, trajectories=[])])
    assert A[-200:] not in file.read_bytes() and B[-200:] not in file.read_bytes() and file.stat().st_size < 600
    path.unlink()
    (group,) = load_groups(file)
    again = ImageStore(tmp_path / "run" / "images")
    assert [read_image(image, "here", again) for image in group.prompt.metadata["images"]] == [A, B]


def test_equal_images_are_stored_once_and_readers_without_a_store_write_nothing(tmp_path):
    path = table(tmp_path / "rows.parquet", *({"prompt": str(n), "images": [A, B]} for n in range(4)))
    store = ImageStore(tmp_path / "images")
    kept = read(path, store)
    files = [file for file in (tmp_path / "images").rglob("*") if file.is_file()]
    assert sorted(file.read_bytes() for file in files) == sorted([A, B])
    assert read(path) == kept and len(list(tmp_path.iterdir())) == 2


def test_sizes_are_known_when_a_row_has_been_read(tmp_path):
    rows = RowImages(None)
    read(table(tmp_path / "rows.parquet", {"prompt": "x", "images": [A, B]}), rows=rows)
    assert rows.sizes == {STORED_A: (48, 32), STORED_B: (16, 64)}
