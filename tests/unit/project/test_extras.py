"""Each extra keeps to its README: the extras that it uses and its size; the core names none of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import grimp
import pytest

from slimx import entry_points
from slimx.errors import SlimxError
from tools import house

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "slimx" / "extras"
EXTRAS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__")
FACTS = re.compile(r"^Extras used: (?P<used>.+)\. Size: at most (?P<tokens>[\d,]+) tokens\.$", re.MULTILINE)
POINTS = [
    (group, name, value)
    for group, points in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].items()
    for name, value in points.items()
    if group.startswith("slimx.")
]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("slimx", exclude_type_checking_imports=True, cache_dir=None)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_has_a_readme_and_tests(extra: str) -> None:
    assert list((ROOT / "tests" / "extras" / extra).rglob("test_*.py"))
    text = (FOLDER / extra / "README.md").read_text()
    assert FACTS.search(text)
    links = re.findall(r"\]\(([^)#]+)", text)
    files = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert [path for path in links if not (FOLDER / extra / path).exists()] == []
    assert [path for path in files if not (any((FOLDER / extra).rglob(path)) or (ROOT / path).exists())] == []
    assert ast.get_docstring(ast.parse((FOLDER / extra / "__init__.py").read_text()))


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_of_the_size_that_its_readme_has(extra: str) -> None:
    bound = int(FACTS.search((FOLDER / extra / "README.md").read_text())["tokens"].replace(",", ""))
    tokens = sum(module.tokens for module in house.modules_of(FOLDER / extra))
    assert 0.9 * bound <= tokens <= bound


def test_extras_import_those_that_their_readme_names(graph: grimp.ImportGraph) -> None:
    named, imported = {}, {}
    for extra in EXTRAS:
        used = FACTS.search((FOLDER / extra / "README.md").read_text())["used"]
        named[extra] = set() if used == "none" else set(used.split(", "))
        package = f"{house.EXTRAS}.{extra}"
        imported[extra] = {
            found.split(".")[2]
            for module in {package, *graph.find_descendants(package)}
            for found in graph.find_modules_directly_imported_by(module)
            if found.count(".") >= 2 and house.is_in_extras(found)
        } - {extra}
    assert imported == named


def test_no_text_of_the_core_names_an_extra() -> None:
    for path in (ROOT / "slimx").rglob("*.py"):
        if not path.is_relative_to(FOLDER):
            text = path.read_text()
            tokens = house.code_tokens(text, ast.parse(text))
            assert [token.line for token in tokens if re.search(r"\bextras[./]", token.string)] == [], path


@pytest.mark.parametrize(("group", "name", "value"), POINTS, ids=[f"{group}:{name}" for group, name, _ in POINTS])
def test_each_entry_point_is_installed_and_can_be_loaded(group: str, name: str, value: str) -> None:
    assert entry_points.find(group)[name].value == value
    assert entry_points.load(group, name) is not None


@pytest.mark.parametrize("group", ["slimx.objectives", "slimx.sections"])
def test_a_module_that_the_configuration_loads_can_be_the_first_import(group: str) -> None:
    for module in {value.partition(":")[0] for owner, _, value in POINTS if owner == group}:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True, timeout=300)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of a group `slimx.test`."""
    found: list[EntryPoint] = []
    entry_points.find.cache_clear()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    yield found
    entry_points.find.cache_clear()


def test_a_group_without_entry_points_is_refused(points: list[EntryPoint]) -> None:
    """An outdated installation is refused: it would leave trackers out in silence."""
    with pytest.raises(SlimxError) as refusal:
        entry_points.find("slimx.test")
    assert (refusal.value.code, refusal.value.about) == ("entry_point.none", "slimx.test")


def test_a_name_of_two_packages_is_refused(points: list[EntryPoint]) -> None:
    points += [EntryPoint("one", "json:loads", "slimx.test"), EntryPoint("one", "json:dumps", "slimx.test")]
    with pytest.raises(SlimxError) as refusal:
        entry_points.find("slimx.test")
    assert (refusal.value.code, refusal.value.about) == ("entry_point.twice", "one")


@pytest.mark.parametrize("value", ["no_such_module:loads", "json:no_such_name"])
def test_an_entry_point_that_cannot_be_loaded_is_refused_by_its_name(points: list[EntryPoint], value: str) -> None:
    points += [EntryPoint("good", "json:loads", "slimx.test"), EntryPoint("wrong", value, "slimx.test")]
    assert entry_points.load("slimx.test", "good")("1") == 1
    with pytest.raises(SlimxError) as refusal:
        entry_points.load_all("slimx.test")
    assert (refusal.value.code, refusal.value.about) == ("entry_point.load", "wrong")
    assert value in str(refusal.value)
