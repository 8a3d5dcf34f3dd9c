"""Directories as pandas, Spark, Dask, DuckDB and `datasets` write them are one data set, and caches stand in for a
network."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from slimx.config.sections.rollout import RowFields
from slimx.data.prompts.mapping import RowMapping
from slimx.data.prompts.read import read_prompts
from tests.refusals import refused

FIELDS = RowFields(prompt="question", answer="answer")
REVISION = "a" * 40


def table(*numbers: int) -> pa.Table:
    return pa.Table.from_pylist([{"question": f"{number}+1=", "answer": number + 1} for number in numbers])


def written(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table(*numbers), path)
    return path


def answers(path: Path | str, fields: RowFields = FIELDS, **chosen: str) -> list[str | None]:
    return [prompt.answer for prompt in read_prompts(path, RowMapping(fields), **chosen)]


@pytest.mark.parametrize(
    "names",
    [
        ("part-00000-3f2a-c000.snappy.parquet", "part-00001-9b1c-c000.snappy.parquet"),
        ("part.0.parquet", "part.1.parquet"),
        ("data_0.parquet", "data_1.parquet"),
        ("data-00000-of-00002.parquet", "data-00001-of-00002.parquet"),
        ("0000.parquet", "0001.parquet"),
    ],
)
def test_files_of_one_table_are_read_one_after_the_other(tmp_path, names):
    for number, name in enumerate(names):
        written(tmp_path / "set" / name, number)
    (tmp_path / "set" / "_SUCCESS").touch()
    written(tmp_path / "set" / "_temporary" / "part-00000.parquet", 9)
    assert answers(tmp_path / "set") == ["1", "2"]


def test_folders_of_column_and_value_are_columns(tmp_path):
    for level, number in (("easy", 0), ("not%20easy", 1), ("__HIVE_DEFAULT_PARTITION__", 2)):
        written(tmp_path / "year=2024" / f"level={level}" / f"{number}f2a-0.parquet", number)
    read = read_prompts(tmp_path, RowMapping(RowFields(prompt="question", answer="answer", metadata=("year", "level"))))
    assert [(prompt.answer, prompt.metadata["year"], prompt.metadata["level"]) for prompt in read] == [
        ("3", "2024", None),
        ("1", "2024", "easy"),
        ("2", "2024", "not easy"),
    ]
    written(tmp_path / "other" / "level=easy" / "x.parquet", 7)
    with refused("prompts.split", about=str(tmp_path)):
        answers(tmp_path)


def test_a_pattern_names_the_files_of_one_split(tmp_path):
    for split, shard, number in (("train", 0, 0), ("train", 1, 1), ("test", 0, 2)):
        written(tmp_path / f"{split}-{shard:05d}-of-00002.parquet", number)
    pattern = tmp_path / "train-*.parquet"
    assert answers(pattern) == ["1", "2"]
    assert [prompt.id for prompt in read_prompts(pattern, RowMapping(FIELDS))] == ["train:1", "train:2"]
    with refused("prompts.unreadable", about=str(tmp_path / "dev-*.parquet")):
        answers(tmp_path / "dev-*.parquet")
    odd = written(tmp_path / "odd[1].parquet", 5)  # a name like a pattern, of a file that is there
    written(tmp_path / "odd1.parquet", 6)
    assert answers(odd) == ["6"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache: Path, name: str, revision: str, file: str, *numbers: int) -> None:
    """A file of a data set of the Hub, as huggingface_hub keeps it."""
    home = cache / f"datasets--{name.replace('/', '--')}"
    reference = home / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(REVISION)
    written(home / "snapshots" / REVISION / file, *numbers)


def test_without_a_network_the_hubs_cache_has_the_data_set(cache):
    cached(cache, "me/converted", "refs/convert/parquet", "default/train/0000.parquet", 0)
    assert answers("hf://me/converted") == answers("hf://me/converted/default/train") == ["1"]
    for split, number in (("train", 1), ("test", 2)):
        cached(cache, "me/own", "main", f"data/{split}-00000-of-00001.parquet", number)
    assert (answers("hf://me/own"), answers("hf://me/own/default/test")) == (["2"], ["3"])
    with refused("prompts.download", about="hf://me/other"):
        answers("hf://me/other")


def test_without_a_network_the_cache_of_datasets_has_the_data_set(cache, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    built = datasets.load_dataset("parquet", data_files={"train": str(written(tmp_path / "one.parquet", 4))})
    (file,) = built.cache_files["train"]
    folder = tmp_path / "datasets" / "me___kept" / "default" / "0.0.0" / ("b" * 64)
    folder.mkdir(parents=True)
    (folder / "kept-train.arrow").write_bytes(Path(file["filename"]).read_bytes())
    info = Path(file["filename"]).with_name("dataset_info.json").read_text()
    (folder / "dataset_info.json").write_text(info.replace('"dataset_name": "parquet"', '"dataset_name": "kept"'))
    assert answers("hf://me/kept") == ["5"]
    assert answers(folder, split="train") == ["5"]
