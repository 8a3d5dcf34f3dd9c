"""The documentation keeps up with the code: the generated page, and every file and key that the pages name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from slimx.config.schema import Config
from slimx.config.suggestions import field_at
from slimx.extras.foreign.verl import VERL
from tools.docs import make_architecture, make_foreign, make_metrics, make_unproven
from tools.docs.make_configuration import PAGE, page

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_page_of_the_configuration_is_that_of_the_schema():
    assert PAGE.read_text() == page(), "run python tools/docs/make_configuration.py"


def test_the_page_of_the_metrics_is_that_of_their_table():
    assert make_metrics.PAGE.read_text() == make_metrics.page(), "run python -m tools.docs.make_metrics"


def test_the_page_of_support_has_the_combinations_that_were_never_proven():
    text = make_unproven.PAGE.read_text()
    assert text == make_unproven.replaced(text), "run python -m tools.docs.make_unproven"


def test_the_picture_of_the_architecture_is_that_of_the_import_contracts():
    assert make_architecture.PICTURE.read_text() == make_architecture.picture(), "run tools/docs/make_architecture.py"


def test_every_key_of_the_schema_has_a_description():
    def bare(model, prefix=""):
        for name, field in model.model_fields.items():
            inner = [
                annotation
                for annotation in (field.annotation, *get_args(field.annotation))
                if hasattr(annotation, "model_fields")
            ]
            for nested in inner:
                yield from bare(nested, f"{prefix}{name}.")
            if not inner and not field.description:
                yield prefix + name

    assert list(bare(Config)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_paths_in_the_documentation_lead_somewhere(path):
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    # Files of the repository in backquotes; what a run writes (runs/, RUN/) is not there.
    named = re.findall(r"`((?:slimx|configs|docs|examples|tools|tests|csrc|requirements|benchmarks)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_keys_in_the_documentation_exist(path):
    sections = "|".join(Config.model_fields)
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*)?`", path.read_text())
    theirs = VERL if path == make_foreign.PAGE else {}
    for key in (key for key in named if key not in theirs and not key.endswith(".jsonl")):
        assert field_at(Config, key.split(".")) is not None, f"{key} in {path.name}"


def test_walks_through_the_code_are_short() -> None:
    _, *walks = re.split(r"^## ", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE)
    assert len(walks) == 5
    for walk in walks:
        title = walk.partition("\n")[0]
        assert 5 < len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 15, title
        assert 10 < len(set(re.findall(r"`(slimx/[\w/]+\.py)`", walk))) <= 30, title
