"""The locks are one set of versions and hashes: the CPU's is a part of the GPU's."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import cpython_tags
from packaging.utils import canonicalize_name

from tools.locks import PLATFORMS, PYTHON, hashed, hashes

ROOT = Path(__file__).parents[3]
PIN = re.compile(r"([a-z0-9][a-z0-9.-]*)==(\S+(?: --hash=sha256:[0-9a-f]{64})+)")
NEEDS_A_GPU = {"sglang-kernel", "transformer-engine", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"}


def pins(name: str) -> dict[str, str]:
    """Returns version and hashes by package; every line but comments must be a pin with at least one hash."""
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")]
    found = [PIN.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    versions = {match[1]: match[2] for match in found}
    assert len(versions) == len(lines), "a package is pinned twice"
    assert list(versions) == sorted(versions)
    return versions


def test_the_gpu_lock_has_every_version_and_hash_of_the_others():
    cpu, cuda, gpu = pins("cpu.txt"), pins("cpu-cuda.txt"), pins("cu130.txt")
    for lock in (cpu, cuda):
        assert lock.items() <= gpu.items(), sorted(lock.items() - gpu.items())
    assert gpu.keys() - cpu.keys() >= NEEDS_A_GPU and not cpu.keys() & cuda.keys()


def test_a_cuda_build_of_torch_finds_all_that_it_requires_in_the_locks():
    """Whichever build is installed here; the CPU build requires no CUDA libraries."""
    locked = pins("cpu.txt").keys() | pins("cpu-cuda.txt").keys()
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement("torch")]
    while left:
        parent = left.pop()
        key = canonicalize_name(parent.name), frozenset(parent.extras)
        if key in seen:
            continue
        seen.add(key)
        for requirement in map(Requirement, requires(parent.name) or []):
            if any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in ("", *key[1])):
                left.append(requirement)
    assert {name for name, _ in seen} <= locked


def test_the_cpu_lock_alone_and_with_the_sites_has_all_that_they_require():
    """SGLang's CPU path imports few of its requirements; torch's are those of its build."""
    locked = pins("cpu.txt")
    site = pins("docs.txt")
    assert not site.keys() & (locked.keys() | pins("cu130.txt").keys())
    lacking = {
        f"{package} requires {requirement}"
        for among in (locked, locked | site)
        for package in among.keys() - {"sglang", "torch"}
        for requirement in map(Requirement, requires(package) or [])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not requirement.specifier.contains(
            among.get(canonicalize_name(requirement.name), "none").split()[0], prereleases=True
        )
    }
    assert lacking == set()


def test_hashes_are_those_of_the_wheels_or_of_the_source():
    def file(name: str, sum: str) -> dict:
        return {"url": f"https://index/{name}", "hashes": {"sha256": sum}}

    tags = frozenset(cpython_tags(PYTHON, platforms=PLATFORMS))
    wheels = [
        file("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", "2"),
        file("a-1-cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", "1"),
        file("a-1-cp313-cp313-manylinux_2_28_x86_64.whl", "no"),
        file("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", "no"),
        file("a-1-cp312-cp312-macosx_11_0_arm64.whl", "no"),
    ]
    source = file("a-1.tar.gz", "3")
    assert hashes({"wheels": wheels, "sdist": source}, tags) == ["1", "2"]
    assert hashes({"wheels": wheels[2:], "sdist": source}, tags) == ["3"]
    lock = "# why\na==1 --hash=sha256:old\n"
    assert hashed(lock, {"a==1": ["1", "2"]}) == "# why\na==1 --hash=sha256:1 --hash=sha256:2\n"


def test_both_locks_are_in_the_ranges_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["train"])]
    extra = [Requirement(line) for line in project["optional-dependencies"]["cuda"]]
    for lock, requirements in (("cpu.txt", needed), ("cu130.txt", [*needed, *extra])):
        versions = pins(lock)
        for requirement in requirements:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)].split()[0]), requirement


def test_every_place_names_the_same_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = "{}.{}".format(*sys.version_info)
    assert SpecifierSet(project["project"]["requires-python"]).contains(f"{version}.0")
    assert project["tool"]["ruff"]["target-version"] == f"py{version.replace('.', '')}"
    for name in ("requirements/cpu.txt", "requirements/cu130.txt", "README.md", "Makefile", "Dockerfile", ".ci/run"):
        named = set(re.findall(r"[Pp]ython ?(3\.\d+)", (ROOT / name).read_text()))
        assert named == {version}, name
