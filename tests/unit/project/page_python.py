"""Python that a page shows as a part of a file: it compiles, and its names and attributes are slimx's."""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterator

import slimx
from slimx.data.records import Group, Prompt, Trajectory
from slimx.rollout.draft import Draft
from slimx.rollout.hooks import RewardContext, RolloutContext

KINDS = {
    "ctx": (RolloutContext, RewardContext),
    "draft": (Draft,),
    "group": (Group,),
    "prompt": (Prompt,),
    "trajectory": (Trajectory,),
}
"""Names of the documentation, with the classes that may be meant."""
AROUND = {
    "Case": "of tests/integration/family_cases.py",
    "LossInputs": "of slimx.algorithms",
    "answer": "the result of an agent",
    "found": "the results of a search",
    "np": "numpy",
    "shared_client": "of slimx.extras.agents.agent",
    "stock": "of tests/integration/family_cases.py",
    "torch": "torch",
}
"""Names that a part of a file does not define, each with whose it is."""


def wrong_names(text: str) -> Iterator[str]:
    """The names of a text that nothing defines. Raises SyntaxError if it is no Python, with `await` at its top level,
    and ImportError or AttributeError if an import of slimx fails."""
    text = f"{{{text}}}" if text.startswith('"') else text
    compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    nodes = [*ast.walk(ast.parse(text))]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slimx"):
            module = importlib.import_module(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kinds = KINDS.get(node.value.id, ())
            if kinds and not any(node.attr in {*dir(kind), *kind.__annotations__} for kind in kinds):
                yield f"{node.value.id}.{node.attr}"
    known = bound | set(dir(builtins)) | set(dir(slimx)) | KINDS.keys() | AROUND.keys()
    yield from (node.id for node in nodes if isinstance(node, ast.Name) and node.id not in known)
