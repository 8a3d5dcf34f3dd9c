"""The documentation does what it says: its files are planned or imported, the parts of files that it shows are valid,
its commands are executed as far as they need no GPU, network or minutes, and what they print is what a page shows."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.data.prompts.read import read_prompts
from slimx.dotted import imported
from slimx.observability.tracking.names import METRICS
from tests.documents import COMMANDS, LANGUAGES, PAGES, ROOT, Block, blocks, spans
from tests.unit.project.page_python import AROUND, wrong_names
from tests.unit.project.page_stand import ELSEWHERE, elsewhere, lay_out, missing, shown, try_command
from tools.docs import make_foreign

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BASE = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "checkpoint": {"every": 20}}
"""The run that a part of a page is added to."""
INSIDE = {"box": "rollout.options.toolbox_options", "options": "rollout"}
"""Keys that a page shows without those around them, with these."""
TOOLS, TOOLBOX = "tools", "terminal"
"""Hook and toolbox of a part that shows toolbox_options alone."""


@pytest.fixture(scope="module")
def made_desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("desk")
    lay_out(directory)
    return directory


@pytest.fixture
def desk(made_desk: Path, monkeypatch: pytest.MonkeyPatch):
    """The directory in which a reader works."""
    monkeypatch.chdir(made_desk)
    monkeypatch.syspath_prepend(str(made_desk))
    monkeypatch.setenv("BOXES_TOKEN", "b")
    before = set(sys.modules)
    yield made_desk
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(made_desk)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_right(page: str, desk: Path) -> None:
    found = blocks(page)
    assert [block.name for block in found if block.language not in LANGUAGES] == []
    files = {block.file: block for block in found if block.file}
    for name, block in files.items():
        (desk / name).write_text(block.text)
    for block in found:
        if block.language == "console":
            for words, lines in zip(block.commands(), shown(block.text), strict=True):
                if (done := try_command(words, parse_only="FILE" in words)) is None:
                    continue
                refused = any(line.startswith("slimx: ") for line in lines)
                assert done[0] == (2 if refused else 0), (words, done)
                assert (lacking := missing(lines, done[1])) is None, f"{words}: shown is {lacking!r} of\n{done[1]}"
        elif block.language == "bash":
            done = [(words, try_command(words, parse_only=False)) for words in block.commands()]
            assert [row for row in done if row[1] is not None and row[1][0] != 0] == []
        elif block.file is None:
            check_part(block)
    for name in files:
        if name.endswith(".py"):
            importlib.import_module(name.removesuffix(".py"))
        else:
            assert try_command(["slimx", "plan", name], parse_only=False)[0] == 0, name


def check_part(block: Block) -> None:
    """Fails unless a part of a file is valid."""
    if block.language == "python":
        assert [*wrong_names(block.text)] == [], block.name
    elif block.language == "json" and block.text.count("\n{") + 1 == len(block.text.splitlines()):
        Path("lines.jsonl").write_text(block.text)
        assert len(read_prompts("lines.jsonl")) == len(block.text.splitlines())
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        part = yaml.safe_load(block.text)
        for place in {INSIDE[key] for key in part if key not in Config.model_fields}:
            for key in reversed(place.split(".")):
                part = {key: part}
        base = BASE if "sources" not in part.get("rollout", {}) else BASE | {"rollout": {}}
        Path("part.yaml").write_text(OmegaConf.to_yaml(OmegaConf.merge(base, OmegaConf.create(part))))
        check_options(load_config(Path("part.yaml"), []))


def check_options(config: Config) -> None:
    """Raises TypeError or slimx's refusal unless a hook and a toolbox of slimx take their options."""
    options = config.rollout.options
    tools = options.get("toolbox_options", {})
    generate = TOOLS if tools else config.rollout.generate
    if tools or "generate" in config.rollout.model_fields_set and generate.startswith("slimx."):
        inspect.signature(imported("rollout.generate", generate, "slimx.generate")).bind_partial(**options)
    toolbox = options.get("toolbox", TOOLBOX)
    if toolbox.startswith("slimx."):
        imported("rollout.options.toolbox", toolbox, "slimx.toolboxes")(**tools)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_sentences_of_a_page_can_be_typed(page: str, desk: Path) -> None:
    for words in spans(page):
        try_command(words, parse_only=True)


def test_every_exception_occurs_in_a_page() -> None:
    assert {elsewhere(words) for words in COMMANDS} - {None} == ELSEWHERE.keys()
    code = "".join(block.text for page in PAGES for block in blocks(page) if block.language == "python")
    assert [name for name in AROUND if not re.search(rf"\b{name}\b", code)] == []


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
