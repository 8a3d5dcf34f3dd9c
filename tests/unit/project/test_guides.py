"""The guides do what they say: their files are planned or imported, and commands whose output they show are run."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from slimx.config import load_config
from slimx.data.prompts import read_prompts
from slimx.observability.tracking.names import METRICS
from tests.documents import ROOT, blocks
from tests.unit.project.guide_stand import asked_of, commands, could_run, lay_out, missing, typed
from tools.docs import make_foreign

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BASE = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The directory in which a reader works."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.costly
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_what_a_guide_shows_is_what_happens(page, desk):
    found = blocks(str(page.relative_to(ROOT)))
    files = {block.file: block for block in found if block.file}
    for name, block in files.items():
        (desk / name).write_text(block.text)
    for block in found:
        if block.language == "console":
            for command, shown in commands(block.text):
                status, said = typed(command)
                refused = any(line.startswith("slimx: ") for line in shown)
                assert status == (2 if refused else 0), (command, said)
                assert (lacking := missing(shown, said)) is None, f"{command}: the page shows {lacking!r} of\n{said}"
        elif block.language == "bash" and "<<" not in block.text:
            assert [words for words in asked_of(block.text) if not could_run(words)] == []
        elif block.language == "yaml" and block.file is None:
            (desk / "part.yaml").write_text(OmegaConf.to_yaml(OmegaConf.merge(BASE, OmegaConf.create(block.text))))
            load_config(desk / "part.yaml", [])
    for name in files:
        if name.endswith(".py"):
            importlib.import_module(name.removesuffix(".py"))
        else:
            status, said = typed(f"slimx plan {name}")
            assert status == 0, (name, said)


def test_lines_keys_and_commands_of_the_page_on_data_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = blocks("docs/data.md")
    assert [block.language for block in found].count("json") == 1
    for block in found:
        if block.language == "json":
            Path("lines.jsonl").write_text(block.text)
            assert len(read_prompts("lines.jsonl")) == len(block.text.splitlines())
        elif block.language == "yaml":
            given = yaml.safe_load(block.text)["rollout"]
            rollout = given if "sources" in given else BASE["rollout"] | given
            Path("part.yaml").write_text(yaml.safe_dump(BASE | {"rollout": rollout}))
            load_config(Path("part.yaml"), [])
        else:
            assert [words for words in block.commands() if not could_run(words)] == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_curve_that_a_guide_names_is_a_metric(page):
    sections = "|".join({metric.name.partition("/")[0] for metric in METRICS})
    known = [re.sub(r"\\{\w+\\}", "[^`]+", re.escape(metric.name)) for metric in METRICS]
    named = re.findall(rf"`((?:{sections})/[^`\s.]+)`", page.read_text())
    assert [name for name in named if not any(re.fullmatch(pattern, name) for pattern in known)] == []


def test_the_tables_of_foreign_names_are_those_that_refusals_use():
    assert make_foreign.PAGE.read_text() == make_foreign.page(), "run python -m tools.docs.make_foreign"


@pytest.mark.parametrize(
    ("shown", "lacking"),
    [
        (["a", "b 2", "c"], None),
        (["a", "..."], None),
        (["...", "c"], None),
        (["a", "b ...", "c"], None),
        (["a", "b"], "b"),
        (["a", "c"], "c"),
        (["b 2", "..."], "b 2"),
        (["a"], "(the page ends before) b 2"),
    ],
)
def test_a_line_that_an_output_does_not_have_is_found(shown, lacking):
    assert missing(shown, "a\nb 2\nc\n") == lacking
