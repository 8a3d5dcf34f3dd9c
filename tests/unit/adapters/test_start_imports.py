"""Imports that a start does without: SGLang's models that nothing is published to, megatron-core's compiler."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from slimx.models.families import FAMILIES

LISTED = Path(__file__).parents[3] / "slimx/adapters/sglang/models/published.py"
TRAINED_ONLY = {
    "KimiK25ForConditionalGeneration",
    "MiMoForCausalLM",
}
"""Families that engines are refused."""
UNCOMPILED = """
import sys, torch
from slimx.adapters.megatron.uncompiled import uncompiled
compiler = torch.compile
with uncompiled():
    import megatron.core
assert torch.compile is compiler
print("torch._inductor.compile_fx" in sys.modules, "megatron.core.transformer" in sys.modules)
"""


def test_every_family_has_its_class_among_the_models_that_servers_import():
    assigned = [node for node in ast.parse(LISTED.read_text()).body if isinstance(node, ast.Assign)]
    (modules,) = (ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "MODULES")
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    sources = [Path(package, "srt", "models", f"{name}.py").read_text() for name in modules]
    classes = {node.name for text in sources for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert FAMILIES and set(FAMILIES) - TRAINED_ONLY <= classes


@pytest.mark.costly
def test_a_process_that_trains_nothing_imports_megatron_core_without_the_compiler():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", UNCOMPILED], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
