"""The locks are one set of versions: the CPU's is a part of the GPU's."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PIN = re.compile(r"([a-z0-9][a-z0-9.-]*)==(\S+)(?: +# .+)?")
NEEDS_A_GPU = {"sglang-kernel", "transformer-engine", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"}


def pins(name: str) -> dict[str, str]:
    """Version by package; every line but comments must be a pin."""
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")]
    found = [PIN.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    versions = {match[1]: match[2] for match in found}
    assert len(versions) == len(lines), "a package is pinned twice"
    assert list(versions) == sorted(versions)
    return versions


def test_the_gpu_lock_has_every_version_of_the_cpu_lock():
    cpu, gpu = pins("cpu.txt"), pins("cu130.txt")
    assert cpu.items() <= gpu.items(), sorted(cpu.items() - gpu.items())
    assert gpu.keys() - cpu.keys() >= NEEDS_A_GPU


def test_both_locks_are_in_the_ranges_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    extra = [Requirement(line) for line in project["optional-dependencies"]["cuda"]]
    for lock, wanted in (("cpu.txt", needed), ("cu130.txt", [*needed, *extra])):
        versions = pins(lock)
        for requirement in wanted:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_every_place_names_the_same_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = "{}.{}".format(*sys.version_info)
    assert SpecifierSet(project["project"]["requires-python"]).contains(f"{version}.0")
    assert project["tool"]["ruff"]["target-version"] == f"py{version.replace('.', '')}"
    for name in ("requirements/cpu.txt", "requirements/cu130.txt", "README.md", "Makefile", "Dockerfile", ".ci/run"):
        named = set(re.findall(r"[Pp]ython ?(3\.\d+)", (ROOT / name).read_text()))
        assert named == {version}, name
