"""The public names of the package are imported on first use, from the core or from an extra."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slimx
from slimx import cli, entry_points

ROOT = Path(__file__).parents[3]


def test_exported_names_match_their_types_and_import_nothing_heavy():
    stub = (ROOT / "slimx" / "__init__.pyi").read_text()
    of_extras = {name: point.module for name, point in entry_points.find("slimx.exports").items()}
    exports = slimx._EXPORTS | of_extras
    assert {line.split()[-1] for line in stub.splitlines() if " as " in line} == exports.keys() > of_extras.keys()
    for name, module in exports.items():
        assert f"from {module} import {name} as {name}" in stub and getattr(slimx, name) is not None
    assert set(slimx.__all__) == {"__version__", *exports} and exports.keys() < {*dir(slimx)}
    code = "import sys, slimx; print(*sorted({'torch', 'pydantic', 'slimx.errors', 'slimx'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["slimx"]
    with pytest.raises(AttributeError):
        _ = slimx.no_such_name


def test_a_public_name_of_an_extra_is_no_module_of_the_package():
    """Otherwise it would depend on what has been imported which of the two a script gets."""
    for name in entry_points.find("slimx.exports"):
        assert importlib.util.find_spec(f"slimx.{name}") is None and callable(getattr(slimx, name))


def test_the_version_is_printed():
    done = CliRunner().invoke(cli.app, ["--version"])
    assert (done.exit_code, done.stdout.strip()) == (0, f"slimx {slimx.__version__}")
