"""The size of slimx is measured, and bounded."""

from __future__ import annotations

import grimp
import pytest

from tools import house

TEXT = '''"""A module."""

from a.first import B, C
import d

NUMBER: int = 3
"""Three, or "drei" – with an é."""

class Big:
    """A class."""

    def __init__(self, x, /, y, *, z=(1,
        2)):
        import e; self.x = x  # why
        é = "é"; "text"


def _hidden(): return B
'''
TOKENS = [
    *("NUMBER", ":", "int", "=", "3"),
    *("class", "Big", ":"),
    *("def", "__init__", "(", "self", ",", "x", ",", "/", ",", "y", ",", "*", ",", "z", "="),
    *("(", "1", ",", "2", ")", ")", ":"),
    *(";", "self", ".", "x", "=", "x"),
    *("é", "=", '"é"', ";"),
    *("def", "_hidden", "(", ")", ":", "return", "B"),
]


def test_imports_docstrings_comments_and_layout_are_not_counted() -> None:
    module = house.measure("a.second", "a", TEXT)
    assert [token.string for token in house.code_tokens(TEXT, house.ast.parse(TEXT))] == TOKENS
    assert (module.lines, module.code_lines, module.tokens) == (18, 7, len(TOKENS))
    assert module.imported == {("a.first", "B"), ("a.first", "C")}
    assert module.public == {"NUMBER", "Big"}
    assert module.constructors == {"Big": 3}


def test_dense_idioms_and_unknown_types_are_counted() -> None:
    text = """
from typing import Any
a, b = 1, 2
c, d = divmod(7, 3)
def f(x: Any, y: list[Any]) -> int:  # type: ignore[return-value]
    if (n := len(y)) > 1:
        return 1 if x else [z for z in y]
    return {k: v for k, v in x} or {z for z in y} or sum(z for z in y)
"""
    module = house.measure("slimx.a", "slimx", text)
    idioms = ("tuple assignments", "walrus", "ternaries", "comprehensions", "Any")
    assert [module.nodes[idiom] for idiom in idioms] == [1, 1, 1, 4, 2]
    assert module.ignores == 1
    graph = grimp.ImportGraph()
    graph.add_module("slimx.a")
    figures = house.figures([module], graph, [])
    assert figures["walrus"] == round(1e5 / module.nodes["nodes"])
    assert (figures["Any in the core"], figures["type: ignore in the core"]) == (2, 1)


@pytest.fixture
def graph() -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    for importer, imported in (
        ("slimx.a.b", "slimx.c"),
        ("slimx.c", "slimx.a.b"),
        ("slimx.c", "slimx.d.e"),
        ("slimx.f", "slimx.a.b"),
        ("slimx.d", "slimx.extras.x"),
    ):
        graph.add_import(importer=importer, imported=imported)
    return graph


def test_the_closure_has_the_packages_around_modules(graph: grimp.ImportGraph) -> None:
    for package in ("slimx", "slimx.a", "slimx.extras"):
        graph.add_module(package)
    assert house.closure(graph, ["slimx.a.b"]) == {
        *("slimx", "slimx.a", "slimx.a.b", "slimx.c", "slimx.d", "slimx.d.e", "slimx.extras", "slimx.extras.x")
    }
    with pytest.raises(KeyError):
        house.closure(graph, ["slimx.gone"])


def test_names_are_counted_by_their_importers() -> None:
    texts = {"p.a": "X = 1\ndef y(): ...\nclass Z: ...", "p.b": "from p.a import X, y", "p.c": "from p.a import y"}
    modules = [house.measure(name, "p", text) for name, text in texts.items()]
    assert house.names_with_one_importer(modules) == (1, 2)


def test_large_files_folders_and_constructors_are_named() -> None:
    parameters = ", ".join(f"x{index}" for index in range(house.PARAMETERS + 1))
    text = f"class A:\n  def __init__(self, {parameters}): ..."
    modules = [
        house.measure("p.long", "p", "\n" * (house.FILE_LINES + 1)),
        *(house.measure(f"p.q.m{index}", "p.q", "") for index in range(house.PACKAGE_FILES + 1)),
        *(house.measure(f"{package}.m{index}", package, "") for package in house.LARGE_PACKAGES for index in range(99)),
        house.measure("p.many", "p", text),
    ]
    named = [line.partition(":")[0] for line in house.too_large(modules)]
    assert named == ["p.long", "p.q", "p.many.A"]


def test_extras_are_counted_apart_and_the_cores_imports_of_them_are_edges(graph: grimp.ImportGraph) -> None:
    graph.add_module("slimx.extras")
    names = ("slimx.d", "slimx.extrasmall", "slimx.extras", "slimx.extras.x")
    graph.add_module("slimx.extrasmall")
    graph.add_import(importer="slimx.extras.x", imported="slimx.extras")
    modules = [house.measure(name, "slimx", "a = 1") for name in names]
    for package in ("slimx", "slimx.a"):
        graph.add_module(package)
    found = house.figures(modules, graph, ["slimx.f"])
    assert (found["tokens"], found["core tokens"]) == (12, 6)
    assert (found["files"], found["core files"], found["code lines"], found["core code lines"]) == (4, 2, 4, 2)
    assert found["edges from core to extras"] == 1
    assert found["closure"] == 9
    assert [module.package for module in modules] == list(names)


def test_slimx_stays_within_its_bounds() -> None:
    modules, found = house.measured()
    assert house.passed_bounds(found) == house.too_large(modules) == []
    over = {name: bound + 1 for name, bound in house.BOUNDS.items()}
    assert len(house.passed_bounds(over)) == len(house.BOUNDS)
    assert len(modules) > 300 and {"slimx", "slimx.orchestration.loop"} <= {module.name for module in modules}
