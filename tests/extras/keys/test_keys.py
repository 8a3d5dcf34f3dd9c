"""`slimx keys` finds a key by its name, its section, its words, and its names in other frameworks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from rich.table import Table

from slimx import cli
from slimx.config.schema import Config
from slimx.config.suggestions import known_keys
from slimx.errors import SlimxError
from slimx.extras.foreign.find import FLAGS, PATHS
from slimx.extras.foreign.meaning import Meaning
from slimx.extras.keys.catalog import all_keys, headings
from slimx.extras.keys.names import foreign_names
from slimx.extras.keys.pages import SECTIONS, pages_of
from slimx.extras.keys.search import search
from slimx.extras.keys.show import lines_of
from tests.documents import ROOT


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["slimx", "keys", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_every_key_that_a_file_may_have_is_in_the_catalog() -> None:
    shown = {*all_keys()}
    for heading in headings():
        if heading.like:
            shown |= {path.replace(heading.like, heading.path) for path in shown if path.startswith(heading.like)}
    whole = {"algorithm.loss", "algorithm.advantages"}  # shown as sections with a kind
    assert {*known_keys(Config)} - shown - whole == set()


def test_every_section_has_a_purpose_and_a_page() -> None:
    assert {*SECTIONS} == {*Config.model_fields}
    anchors = (ROOT / "docs/configuration.md").read_text()
    for heading in headings():
        reference, page = pages_of(heading.path)
        assert (ROOT / page).is_file()
        assert f"# {heading.path.replace('.*', '')}\n" in anchors and reference.startswith("docs/configuration.md#")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("rollout.sampling.temperature", "rollout.sampling.temperature"),
        ("trainer.optimizer.lr=3", "trainer.optimizer.lr"),
        ("rollout.engines.0.tensor", "rollout.engines.*.tensor"),
        ("rollout.engines[].tensor", "rollout.engines.*.tensor"),
        ("eval.fields.prompt", "eval.fields.prompt"),
        ("rollout.engines.sglang.mem_fraction_static", "rollout.engines.*.sglang"),
        ("policies.judge.engines.0.count", "rollout.engines.*.count"),
        ("rollout-batch-size", "rollout.prompts_per_step"),
        ("--rollout-batch-size", "rollout.prompts_per_step"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("beta", "algorithm.kl_coef"),
    ],
)
def test_a_key_is_found_by_each_of_its_names(word: str, key: str) -> None:
    (found,) = search([word])
    assert found.whole and found.keys[0].path == key


def test_every_foreign_name_leads_to_its_key_or_to_a_reason() -> None:
    for table in (*FLAGS[:4], *PATHS[:1]):
        for name, entry in table.items():
            meaning = Meaning(entry) if isinstance(entry, str) else entry
            found = search([name]) if "*" not in name else []
            for result in found:
                listed = {key.path for key in (*result.keys, *result.also)}
                listed |= {key.path for heading in result.sections for key in heading.keys}
                assert result.sentence or listed, name
                pairs = [sorted((f"{meaning.key}.", f"{path}."), key=len) for path in listed]  # options are below keys
                listed_or_named = meaning.key in result.sentence or any(
                    longer.startswith(shorter) for shorter, longer in pairs
                )
                assert listed_or_named, name


def test_a_section_lists_its_keys() -> None:
    (found,) = search(["trainer.moe"])
    assert [heading.path for heading in found.sections] == ["trainer.moe"]
    (found,) = search(["rollout"])
    assert {"rollout", "rollout.engines.*", "rollout.sources.*.fields"} <= {one.path for one in found.sections}


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["tensor"], "trainer.tensor"),
        (["kl", "reference"], "algorithm.kl_coef"),
        (["deepep"], "trainer.moe.flex_backend"),
        (["nucleus"], "rollout.sampling.top_p"),
        (["sglang"], "rollout.engines.*.sglang"),
    ],
)
def test_words_are_searched_in_names_before_texts(words: list[str], first: str) -> None:
    (found,) = search(words)
    assert not found.whole and found.keys[0].path == first


@pytest.mark.parametrize(("word", "near"), [("temprature", "temperature"), ("rollot", "rollout"), ("xyzzy", "keys")])
def test_a_word_that_is_nowhere_is_refused_with_the_nearest_names(word: str, near: str) -> None:
    with pytest.raises(SlimxError) as refusal:
        search([word])
    assert (refusal.value.code, refusal.value.about) == ("keys.none", word) and near in str(refusal.value)


def test_the_whole_documentation_of_a_key_is_shown(monkeypatch, capsys) -> None:
    assert typed(monkeypatch, "rollout.engines.tensor", "algorithm.loss.low") == 0
    output = capsys.readouterr().out
    key = all_keys()["rollout.engines.*.tensor"]
    for part in (
        key.text,
        "aliases tensor_parallel_size",
        *foreign_names()[key.path][:1],
        "docs/configuration.md#rolloutengines",
    ):
        assert part in " ".join(output.split())


def test_json_has_the_parts_of_a_key(monkeypatch, capsys) -> None:
    assert typed(monkeypatch, "rollout-batch-size", "cluster.device", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    batch, device = found["keys"]
    assert (batch["key"], batch["default"], device["choices"]) == (
        "rollout.prompts_per_step",
        "32",
        ["auto", "cpu", "cuda"],
    )
    assert "slime --rollout-batch-size" in batch["elsewhere"] and len(found["meanings"]) == 1
    assert typed(monkeypatch, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["keys"]) == len(all_keys())


def test_a_search_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from slimx import cli; sys.argv = ['slimx', 'keys', 'kl']\n"
        "try: cli.main()\n"
        "except SystemExit: print({'torch', 'transformers', 'ray'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines()[-1] == "set()"


def test_words_may_come_as_one_argument() -> None:
    assert search(["batch size"]) == search(["batch", "size"])
    assert "rollout.prompts_per_step" in {key.path for key in search(["batch size"])[0].keys}


def test_an_empty_word_is_no_word(monkeypatch, capsys) -> None:
    assert typed(monkeypatch) == 0
    sections = capsys.readouterr().out
    assert typed(monkeypatch, "", " ") == 0
    assert capsys.readouterr().out == sections and "rollout" in sections


def test_a_word_that_occurs_late_is_shown_in_its_whole_clause() -> None:
    (found,) = search(["several"])
    table = next(line for line in lines_of(found) if isinstance(line, Table))
    cells = [str(cell) for cell in table.columns[-1].cells]
    assert len(cells) == len(found.keys) and all("several" in cell.lower() for cell in cells)
    assert not any("..." in cell for cell in cells)
